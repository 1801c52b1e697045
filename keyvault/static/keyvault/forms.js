// A form with `data-once` is sent once, however often its button is pressed.

document.addEventListener('submit', (event) => {
  const form = event.target;
  if (!form.matches('[data-once]') || event.defaultPrevented) return;
  if (form.dataset.sent) {
    event.preventDefault();
    return;
  }
  form.dataset.sent = 'true';
  for (const button of form.querySelectorAll('button[type="submit"]')) button.setAttribute('aria-disabled', 'true');
});

// A page that the browser restores by its back button can be sent again.
window.addEventListener('pageshow', () => {
  for (const form of document.querySelectorAll('[data-sent]')) {
    delete form.dataset.sent;
    for (const button of form.querySelectorAll('[aria-disabled]')) button.removeAttribute('aria-disabled');
  }
});
