// `/` moves the focus to the search. Escape, and a click elsewhere, close the menus.

const isTyping = (element) => element.matches?.('input, textarea, select, [contenteditable]');

document.addEventListener('keydown', (event) => {
  if (event.key === '/' && !event.ctrlKey && !event.metaKey && !event.altKey && !isTyping(event.target)) {
    const search = document.getElementById('search');
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === 'Escape') {
    const open = event.target.closest?.('details.who[open], details.filter[open]');
    if (!open) return;
    open.open = false;
    open.querySelector('summary').focus();
  }
});

document.addEventListener('click', (event) => {
  for (const menu of document.querySelectorAll('details.who[open], details.filter[open]')) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});
