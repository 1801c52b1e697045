// A form with `data-once` is sent once, however often its button is pressed. One with `data-token-from` first takes the
// token of that page: the sign-in in another tab has renewed it.

import { fetchText, parse } from './fragments.js';

const TOKEN = '[name=csrfmiddlewaretoken]';

async function renewToken(form) {
  const { text } = await fetchText(form.dataset.tokenFrom);
  form.querySelector(TOKEN).value = parse(text).querySelector(TOKEN).value;
}

document.addEventListener('submit', (event) => {
  const form = event.target;
  if (!form.matches('[data-once]') || event.defaultPrevented) return;
  if (form.dataset.sent) {
    event.preventDefault();
    return;
  }
  form.dataset.sent = 'true';
  if (form.dataset.tokenFrom) {
    event.preventDefault();
    // Without a new token, such as before the sign-in, the server shows the form again.
    renewToken(form).catch(() => null).then(() => form.submit());
  }
  for (const button of form.querySelectorAll('button[type="submit"]')) button.setAttribute('aria-disabled', 'true');
});

// A page that the browser restores by its back button can be sent again.
window.addEventListener('pageshow', () => {
  for (const form of document.querySelectorAll('[data-sent]')) {
    delete form.dataset.sent;
    for (const button of form.querySelectorAll('[aria-disabled]')) button.removeAttribute('aria-disabled');
  }
});
