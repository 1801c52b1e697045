/** A server that plays the service's part with the replies of conformance.json, and a client that sends raw requests. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { connect } from "node:net";
import { inspect } from "node:util";

export const conformance = JSON.parse(readFileSync(new URL("../../conformance.json", import.meta.url), "utf8"));
export const KEYS = conformance.keys;

/** Listen on a loopback port until the test ends, and return the URL. */
export async function listen(test, server, host = "127.0.0.1") {
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  test.after(() => {
    server.close();
    server.closeAllConnections();
  });
  return `http://${host}:${server.address().port}`;
}

export class Service {
  received = [];
  replies = [];

  static async start(test, { host, other, replies = [] } = {}) {
    const service = new Service();
    service.replies = [...replies];
    service.server = createServer((request, response) => service.#answer(request, response));
    service.url = await listen(test, service.server, host);
    service.other = other?.url ?? "";
    return service;
  }

  /** Set the replies of the next call, and forget what was received. */
  begin(replies) {
    this.received = [];
    this.replies = [...replies];
  }

  async #answer(request, response) {
    const parts = [];
    for await (const part of request) {
      parts.push(part);
    }
    const { method, url, headers } = request;
    this.received.push({ method, path: url, headers, body: Buffer.concat(parts).toString() });
    const reply = this.replies.shift() ?? { status: 599, text: "", headers: {} };
    const text = Buffer.from(reply.body === undefined ? (reply.text ?? "") : JSON.stringify(reply.body));
    for (const [name, value] of Object.entries(reply.headers ?? {})) {
      response.setHeader(name, value.replace("{self}", this.url).replace("{other}", this.other));
    }
    switch (reply.fault) {
      case undefined:
        response.writeHead(reply.status);
        response.end(text);
        break;
      case "silent":
        break;
      case "cut":
        response.destroy();
        break;
      case "cut_body":
      case "slow_body":
        response.writeHead(reply.status, { "Content-Type": "application/json", "Content-Length": text.length });
        response.write(text.subarray(0, text.length / 2), () => reply.fault === "cut_body" && response.destroy());
        break;
      default:
        assert.fail(`unknown fault ${reply.fault}`);
    }
  }
}

/** Send the path and repeated headers unchanged. Returns status, headers (a Headers) and the body's text. */
export async function sendRaw(url, method, path, headers) {
  const { hostname, port } = new URL(url);
  const head = [`${method} ${path} HTTP/1.1`, "Host: shop.example", "Connection: close", "Content-Length: 0"];
  const socket = connect(Number(port), hostname);
  socket.write([...head, ...headers.map(([name, value]) => `${name}: ${value}`), "", ""].join("\r\n"));
  let text = "";
  for await (const part of socket.setEncoding("utf8")) {
    text += part;
  }
  const [start, body] = [text.slice(0, text.indexOf("\r\n\r\n")), text.slice(text.indexOf("\r\n\r\n") + 4)];
  const [line, ...lines] = start.split("\r\n");
  const found = new Headers(lines.map((each) => [each.slice(0, each.indexOf(":")), each.slice(each.indexOf(":") + 1).trim()]));
  const json = /^chunked$/i.test(found.get("transfer-encoding") ?? "") ? unchunked(body) : body;
  return { status: Number(line.split(" ")[1]), headers: found, body: json };
}

function unchunked(text) {
  const size = Number.parseInt(text, 16);
  const start = text.indexOf("\r\n") + 2;
  return size === 0 ? "" : text.slice(start, start + size) + unchunked(text.slice(start + size + 2));
}

/** Assert that no representation of the value contains a key. */
export function checkNoKey(...values) {
  const text = values.map((value) => `${inspect(value, { depth: 9, showHidden: true })} ${JSON.stringify(value)} ${value}`);
  for (const [name, key] of Object.entries(KEYS)) {
    assert(!text.join().includes(key.slice(27)), name);
  }
}
