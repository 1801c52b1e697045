// The page of a secret: masked until it is revealed. One that is shown once is left with a warning, unless it is stored.

const MASK = '\u2022'.repeat(32);

for (const region of document.querySelectorAll('[data-secret]')) {
  const shown = region.querySelector('code');
  const button = region.querySelector('[data-secret-reveal]');
  let secret = shown.textContent, isRevealed = false;

  const show = () => {
    shown.textContent = isRevealed ? secret : MASK;
    button.textContent = isRevealed ? 'Hide' : 'Reveal';
  };
  button.hidden = false;
  button.addEventListener('click', () => { isRevealed = !isRevealed; show(); });
  show();

  if (region.dataset.secretOnce) {
    // A reload opens the page of the row, and does not send the form again.
    history.replaceState(null, '', region.dataset.secretOnce);
    const warn = (event) => event.preventDefault();
    window.addEventListener('beforeunload', warn);
    for (const link of document.querySelectorAll('[data-secret-stored]')) {
      link.addEventListener('click', () => window.removeEventListener('beforeunload', warn));
    }
  }
  // No page that the browser keeps for its back button has the secret.
  window.addEventListener('pagehide', () => {
    secret = '';
    region.remove();
  });
}
