// Buttons with `data-copy` copy that text. Without scripts they are hidden.
import { onContent } from './live.js';

onContent((root) => {
  if (!navigator.clipboard) return;
  for (const button of root.querySelectorAll('[data-copy][hidden]')) button.hidden = false;
});

document.addEventListener('click', async (event) => {
  const button = event.target.closest?.('[data-copy]');
  if (!button) return;
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = 'copied';
  } catch {
    button.textContent = 'failed';
  }
  setTimeout(() => { button.textContent = label; }, 1500);
});
