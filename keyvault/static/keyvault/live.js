// A region with `data-live` (a URL) is updated in place every `data-live-seconds`, while the page is visible.
import { fetchText, morph, parse, SignedOutError } from './fragments.js';

const listeners = [];

/** Call the listener with the document now, and with each region after its update. */
export function onContent(listener) {
  listeners.push(listener);
  listener(document);
}

for (const region of document.querySelectorAll('[data-live]')) watch(region);

function watch(region) {
  const milliseconds = 1000 * Number(region.dataset.liveSeconds);
  let etag = null;
  let timer = null;
  let isRunning = false;
  const update = async () => {
    timer = null;
    if (document.hidden) return;
    isRunning = true;
    try {
      const headers = { 'X-Keyvault-Fragment': 'live', ...(etag && { 'If-None-Match': etag }) };
      const found = await fetchText(region.dataset.live, { headers, cache: 'no-store' });
      if (found.text !== null) {
        etag = found.etag;
        // In an element of its own: the parser drops white space at the beginning of a body, and then no node matches.
        morph(region, parse(`<div>${found.text}</div>`).body.firstChild);
        for (const listener of listeners) listener(region);
      }
      say('');
      if (found.isEnded) return;
    } catch (error) {
      if (error instanceof SignedOutError) {
        say('Your session has ended. ', 'Sign in');
        return;
      }
      say('Updates are interrupted. The page shows an earlier state.');
    } finally {
      isRunning = false;
    }
    timer = setTimeout(update, milliseconds);
  };
  document.addEventListener('visibilitychange', () => {
    if (!document.hidden && timer === null && !isRunning) update();
  });
  timer = setTimeout(update, milliseconds);
}

/** Show a status at the edge of the page; empty: none. `link`: label of a link that reloads the page. */
function say(text, link = '') {
  const status = document.querySelector('.live-status');
  if (status.textContent === text) return;
  status.textContent = text;
  if (link) {
    const anchor = document.createElement('a');
    anchor.href = window.location.href;
    anchor.textContent = link;
    status.append(anchor);
  }
}
