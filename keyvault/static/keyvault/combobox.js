// A text input with `data-combobox` (the URL of a view of choices) offers matching rows while the operator types.
// The input's value is what is sent, so that the field also works without scripts: type or paste the id.
import { onContent } from './live.js';

const DELAY = 150;
let counter = 0;

onContent((root) => {
  for (const input of root.querySelectorAll('input[data-combobox]:not([role])')) enhance(input);
});

function enhance(input) {
  const box = document.createElement('div');
  box.className = 'combobox';
  const popup = document.createElement('div');
  popup.className = 'combobox-popup';
  const list = document.createElement('div');
  list.id = `combobox-${(counter += 1)}`;
  list.setAttribute('role', 'listbox');
  list.setAttribute('aria-label', 'Choices');
  list.hidden = true;
  // Beside the list, which may have only options. On the page before its text, so that screen readers announce it.
  const status = document.createElement('p');
  status.className = 'help';
  status.setAttribute('role', 'status');
  popup.append(list, status);
  input.replaceWith(box);
  box.append(input, popup);
  input.setAttribute('role', 'combobox');
  input.setAttribute('aria-autocomplete', 'list');
  input.setAttribute('aria-controls', list.id);
  input.setAttribute('aria-expanded', 'false');
  input.autocomplete = 'off';

  let timer = null;
  let request = null;
  let active = -1;

  const close = () => {
    clearTimeout(timer);
    request?.abort();
    list.hidden = true;
    list.replaceChildren();
    status.textContent = '';
    active = -1;
    input.setAttribute('aria-expanded', 'false');
    input.removeAttribute('aria-activedescendant');
  };
  const select = (index) => {
    const options = [...list.querySelectorAll('[role="option"]')];
    options.forEach((option, place) => option.setAttribute('aria-selected', String(place === index)));
    active = index;
    const option = options[index];
    input.setAttribute('aria-activedescendant', option.id);
    option.scrollIntoView({ block: 'nearest' });
  };
  const choose = (option) => {
    input.value = option.dataset.value;
    close();
    input.dispatchEvent(new Event('change', { bubbles: true }));
  };
  const show = ({ choices, has_more: hasMore }) => {
    list.replaceChildren(...choices.map((choice, index) => optionOf(choice, `${list.id}-${index}`)));
    list.hidden = !choices.length;
    status.textContent = describe(choices.length, hasMore);
    active = -1;
    input.setAttribute('aria-expanded', String(!list.hidden));
    input.removeAttribute('aria-activedescendant');
  };
  const find = async () => {
    if (document.activeElement !== input) return;
    request?.abort();
    request = new AbortController();
    const url = new URL(input.dataset.combobox, window.location.href);
    url.searchParams.set('q', input.value.trim());
    try {
      const response = await fetch(url, { credentials: 'same-origin', redirect: 'error', signal: request.signal });
      if (!response.ok) throw new Error(`status ${response.status}`);
      show(await response.json());
    } catch (error) {
      // A newer request, or the end of the choice, has replaced this one.
      if (error.name === 'AbortError') return;
      close();
      status.textContent = 'Choices cannot be loaded. Type the id.';
    }
  };

  input.addEventListener('input', () => {
    clearTimeout(timer);
    timer = setTimeout(find, DELAY);
  });
  input.addEventListener('keydown', (event) => {
    const options = list.querySelectorAll('[role="option"]');
    if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      if (list.hidden) {
        find();
      } else if (options.length) {
        const step = event.key === 'ArrowDown' ? 1 : -1;
        select((active + step + options.length) % options.length);
      }
    } else if (event.key === 'Enter' && !list.hidden && options[active]) {
      event.preventDefault();
      choose(options[active]);
    } else if (event.key === 'Escape' && status.textContent) {
      event.preventDefault();
      close();
    }
  });
  input.addEventListener('blur', close);
  popup.addEventListener('mousedown', (event) => event.preventDefault());
  list.addEventListener('click', (event) => {
    const option = event.target.closest('[role="option"]');
    if (option) choose(option);
  });
}

function optionOf({ value, label, detail }, id) {
  const option = document.createElement('div');
  option.id = id;
  option.dataset.value = value;
  option.setAttribute('role', 'option');
  option.setAttribute('aria-selected', 'false');
  const name = document.createElement('span');
  name.textContent = label;
  const more = document.createElement('small');
  more.textContent = detail;
  option.append(name, more);
  return option;
}

function describe(count, hasMore) {
  if (!count) return 'Nothing matches.';
  const choices = count === 1 ? '1 choice.' : `${count} choices.`;
  return hasMore ? `${choices} More rows match. Type more of the name or id.` : choices;
}
