/** What verifier and merchant client share: which addresses and keys are accepted, and one bounded request. */

export type Environment = "sandbox" | "production";

const SCOPES: Record<Environment, string> = { sandbox: "sbx", production: "prd" };

/** Maximum size of a reply, in bytes. */
const MAX_REPLY_BYTES = 1 << 20;

export type Refusal = "base_url" | "environment" | "key" | "kind" | "bearer" | "path" | "idempotency_key";

/** A client refused to send something; nothing was sent. */
export class RefusedError extends Error {
  override readonly name = "RefusedError";

  constructor(
    readonly refusal: Refusal,
    detail: string,
  ) {
    super(detail);
  }
}

const KEY_STRING = /^[a-z][a-z0-9]{0,15}_(pub|prv|cat|svc)_(sbx|prd|all)_[0-9A-Za-z]{65}$/;
const KEY_SHAPED = /_(?:pub|prv|cat|svc)_(?:sbx|prd|all)_[0-9A-Za-z]{16}/;

/** Return kind and scope of a key string, and empty texts for anything else. The checksum is left to the service. */
export function kindAndScope(text: string): { kind: string; scope: string } {
  const found = KEY_STRING.exec(text);
  return { kind: found?.[1] ?? "", scope: found?.[2] ?? "" };
}

export function hasKey(text: string): boolean {
  return KEY_SHAPED.test(text);
}

export function isOfEnvironment(scope: string, environment: Environment): boolean {
  return scope === SCOPES[environment];
}

const ACCEPTED = "Use https://, or http:// on a loopback address.";

/** Return the base URL without a trailing slash. Accepts https, and http on a loopback address. */
export function readBaseUrl(text: string, environment: Environment): string {
  if (!Object.hasOwn(SCOPES, environment)) {
    throw new RefusedError("environment", 'Unknown environment. Use "sandbox" or "production".');
  }
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw new RefusedError("base_url", `The base URL is not valid. ${ACCEPTED}`);
  }
  if (url.username !== "" || url.password !== "" || url.search !== "" || url.hash !== "") {
    throw new RefusedError("base_url", "The base URL has a user, a query or a fragment. Remove it.");
  }
  if (url.protocol !== "https:" && !(url.protocol === "http:" && isLoopback(url.hostname))) {
    throw new RefusedError("base_url", `The base URL would send credentials in clear text. ${ACCEPTED}`);
  }
  const named = url.pathname.replace(/\/$/, "").split("/").at(-1) ?? "";
  if (Object.hasOwn(SCOPES, named) && named !== environment) {
    throw new RefusedError("environment", `The base URL is that of ${named}, and the client is for ${environment}.`);
  }
  return url.href.replace(/\/$/, "");
}

function isLoopback(host: string): boolean {
  return host === "localhost" || host === "[::1]" || /^127(?:\.[0-9]{1,3}){3}$/.test(host);
}

export interface Reply {
  status: number;
  headers: Headers;
  text: string;
}

/** Send one request and return the whole reply. Follows no redirect. Rejects when the time is over. */
export async function send(url: string, request: RequestInit, timeoutMs: number): Promise<Reply> {
  const signal = AbortSignal.timeout(Math.ceil(timeoutMs));
  const response = await fetch(url, { ...request, redirect: "manual", signal });
  const parts: Uint8Array[] = [];
  let size = 0;
  if (response.body !== null) {
    for await (const part of response.body as AsyncIterable<Uint8Array>) {
      parts.push(part);
      size += part.length;
      if (size > MAX_REPLY_BYTES) {
        throw new Error(`the reply is larger than ${MAX_REPLY_BYTES} bytes`);
      }
    }
  }
  return { status: response.status, headers: response.headers, text: Buffer.concat(parts).toString("utf8") };
}

/** Parse a JSON object. Returns undefined for anything else. */
export function readObject(text: string): Record<string, unknown> | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return isObject(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function isText(value: unknown): value is string {
  return typeof value === "string" && value !== "";
}

export const WHOLE_SECONDS = /^[0-9]{1,9}$/;

/** Return an error code for a message. An answer of another server may contain anything. */
export function printableCode(code: unknown): string {
  return typeof code === "string" && /^[a-z_]{1,64}$/.test(code) ? code : "without a code";
}
