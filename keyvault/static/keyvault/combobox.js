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
  const list = document.createElement('div');
  list.className = 'combobox-options';
  list.id = `combobox-${(counter += 1)}`;
  list.setAttribute('role', 'listbox');
  list.setAttribute('aria-label', 'Choices');
  list.hidden = true;
  input.replaceWith(box);
  box.append(input, list);
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
    if (document.activeElement !== input) return;
    list.replaceChildren(...choices.map((choice, index) => optionOf(choice, `${list.id}-${index}`)));
    if (!choices.length) list.append(noteOf('Nothing matches.'));
    if (hasMore) list.append(noteOf('More rows match. Type more of the name or id.'));
    list.hidden = false;
    active = -1;
    input.setAttribute('aria-expanded', 'true');
  };
  const find = async () => {
    request?.abort();
    request = new AbortController();
    const url = new URL(input.dataset.combobox, window.location.href);
    url.searchParams.set('q', input.value.trim());
    try {
      const response = await fetch(url, { credentials: 'same-origin', redirect: 'error', signal: request.signal });
      if (response.ok) show(await response.json());
    } catch (error) {
      // A newer request, or the end of the choice, has replaced this one.
      if (error.name !== 'AbortError') close();
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
    } else if (event.key === 'Escape' && !list.hidden) {
      event.preventDefault();
      close();
    }
  });
  input.addEventListener('blur', close);
  list.addEventListener('mousedown', (event) => event.preventDefault());
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

function noteOf(text) {
  const note = document.createElement('p');
  note.className = 'help';
  note.textContent = text;
  return note;
}
