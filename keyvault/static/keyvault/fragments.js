// The only place that makes HTML of text: a response of the console itself, parsed under one named policy.

const policy = window.trustedTypes?.createPolicy('keyvault-fragments', { createHTML: (text) => text });

/** Fetch a page of the console. `text` is null if it has not changed. Throws if the session has ended or it fails. */
export async function fetchText(url, options = {}) {
  const response = await fetch(url, { credentials: 'same-origin', redirect: 'manual', ...options });
  const isEnded = response.headers.has('X-Keyvault-Ended');
  if (response.status === 304) return { text: null, isEnded };
  if (response.type === 'opaqueredirect') throw new SignedOutError();
  if (!response.ok) throw new Error(`status ${response.status}`);
  return { text: await response.text(), etag: response.headers.get('ETag'), isEnded };
}

export class SignedOutError extends Error {}

/** Return a document of the HTML of a page or fragment. Its scripts do not run. */
export function parse(text) {
  return new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, 'text/html');
}

/** Change the children of a node into those of another one. Nodes that stay keep their focus, scroll and selection. */
export function morph(current, wanted) {
  const olds = childrenByName(current), news = childrenByName(wanted);
  const names = new Map([...news].map(([name, node]) => [node, name]));
  for (const [name, old] of olds) if (!news.has(name)) old.remove();
  let place = current.firstChild;
  for (const node of wanted.childNodes) {
    const isElement = node.nodeType === Node.ELEMENT_NODE;
    while (isElement && place && place.nodeType !== Node.ELEMENT_NODE) place = removed(place);
    const old = isElement ? olds.get(names.get(node)) : place?.nodeType === node.nodeType && place;
    if (!old) {
      current.insertBefore(document.importNode(node, true), place);
      continue;
    }
    if (old === place) place = place.nextSibling;
    else move(old, place);
    if (isElement) {
      morphAttributes(old, node);
      morph(old, node);
    } else if (old.nodeValue !== node.nodeValue) {
      old.nodeValue = node.nodeValue;
    }
  }
  while (place) place = removed(place);
}

/**
 * Return the child elements by a name that is the same before and after an update: a link by its address, a row by its
 * first link, so that the focus stays on what it was on. Those that are alike are counted.
 */
function childrenByName(parent) {
  const counts = new Map();
  return new Map([...parent.children].map((child) => {
    const link = child.matches('li, tr') ? child.querySelector('a') : child;
    const kind = `${child.nodeName} ${child.id} ${link?.getAttribute('href') ?? ''}`;
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
    return [`${kind} ${counts.get(kind)}`, child];
  }));
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

/** Move an element. The browser takes the focus from what is moved. */
function move(element, place) {
  const focused = document.activeElement;
  place.before(element);
  if (element.contains(focused)) focused.focus({ preventScroll: true });
}

function morphAttributes(old, node) {
  for (const { name } of [...old.attributes]) {
    if (!node.hasAttribute(name) && !isOfReader(old, name)) old.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    if (old.getAttribute(name) !== value && !isOfReader(old, name)) old.setAttribute(name, value);
  }
}

/** Whether the reader, not the server, decides on the attribute: what is open, and what the scripts have shown. */
function isOfReader(element, name) {
  const isOpen = name === 'open' && element.nodeName === 'DETAILS';
  return isOpen || (name === 'hidden' && element.matches('[data-copy]')) || name === 'data-local';
}
