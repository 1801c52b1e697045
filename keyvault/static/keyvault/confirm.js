// A link with `data-confirm` (the id of a <dialog>) opens the dialog. Without scripts it opens the action's own page.

document.addEventListener('click', (event) => {
  const link = event.target.closest?.('[data-confirm]');
  const dialog = link && document.getElementById(link.dataset.confirm);
  if (dialog) {
    event.preventDefault();
    dialog.showModal();
  } else if (event.target.closest?.('dialog [data-close]')) {
    event.target.closest('dialog').close();
  }
});
