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
  const news = [...wanted.childNodes];
  news.forEach((node, index) => {
    const old = current.childNodes[index];
    if (!old) {
      current.append(document.importNode(node, true));
    } else if (old.nodeName !== node.nodeName || (old.id ?? '') !== (node.id ?? '')) {
      old.replaceWith(document.importNode(node, true));
    } else if (node.nodeType === Node.ELEMENT_NODE) {
      morphAttributes(old, node);
      morph(old, node);
    } else if (old.nodeValue !== node.nodeValue) {
      old.nodeValue = node.nodeValue;
    }
  });
  while (current.childNodes.length > news.length) current.lastChild.remove();
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
