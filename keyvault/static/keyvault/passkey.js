// Buttons with `data-passkey` ("create" or "get") ask the browser for a passkey, and submit their form with it.
'use strict';

for (const button of document.querySelectorAll('[data-passkey]')) {
  const form = button.form;
  button.addEventListener('click', async (event) => {
    event.preventDefault();
    const problem = form.querySelector('[data-passkey-error]');
    problem.hidden = true;
    try {
      const options = JSON.parse(document.getElementById('passkey-options').textContent);
      const credential = await window.webauthnJSON[button.dataset.passkey](options);
      form.elements.second_factor_credential.value = JSON.stringify(credential);
      form.requestSubmit();
    } catch (error) {
      problem.hidden = false;
    }
  });
}
