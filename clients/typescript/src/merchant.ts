/** Send requests of a merchant's backend. */

import { randomUUID } from "node:crypto";
import { readFile } from "node:fs/promises";
import { setTimeout as delay } from "node:timers/promises";

import {
  type Environment,
  type Reply,
  RefusedError,
  WHOLE_SECONDS,
  hasKey,
  isOfEnvironment,
  isText,
  kindAndScope,
  printableCode,
  readBaseUrl,
  readObject,
  send,
} from "./connection.js";

const BACKOFF_BASE_MS = 500;
const BACKOFF_CAP_MS = 8_000;

/** What a retry spends of the budget. A call that succeeds with its first attempt earns 1. */
const RETRY_COST = 10;

const TEMPORARY = new Set([408, 429, 502, 503, 504]);
const RELOADS = new Set(["credential_invalid", "environment_mismatch", "key_not_active", "key_expired", "key_revoked"]);

export interface MerchantOptions {
  /** The environment's base URL, such as https://api.example/sandbox. */
  baseUrl: string;
  environment: Environment;
  /** The API key, or a function that returns it: for the first request, and again after the service refused the key. */
  key: string | (() => string | Promise<string>);
  /** Attempts of one call; 20 by default, as many as fit into the default deadline. */
  maxAttempts?: number;
  /** Retries that all calls share; 100 by default. */
  retryBudget?: number;
  /**
   * Deadline of one call with all its attempts and waits, in milliseconds; 60,000 by default. Calls outlive a restart of the
   * service that is shorter.
   */
  deadlineMs?: number;
  /** Deadline of one attempt, in milliseconds; 20,000 by default. */
  attemptTimeoutMs?: number;
  /** Replaces the wait between attempts, in tests. */
  sleep?: (ms: number) => Promise<unknown>;
}

export interface MerchantRequest {
  method: string;
  /** Path relative to the base URL, such as /merchants/orders. */
  path: string;
  /** JSON text, sent unchanged with each attempt. */
  body?: string;
  /** For POST and PATCH; a new one by default. To repeat a call after an error, give the key and body of the first. */
  idempotencyKey?: string;
  /** Customer access token, where the endpoint supports it. */
  customerToken?: string;
}

export interface MerchantResponse {
  status: number;
  headers: Headers;
  /** The parsed body; null without one. */
  json: unknown;
}

/** An answer that is no success, or the reason (`cause`) why there is none: then `status` is 0. */
export class KeyvaultError extends Error {
  override readonly name = "KeyvaultError";

  /** `code`, `check` and `requestId` are of the problem document. Report the requestId to support. */
  constructor(
    readonly status: number,
    readonly code: string | null = null,
    readonly check: number | null = null,
    readonly requestId: string | null = null,
    readonly retryAfterSeconds = 0,
    cause?: unknown,
  ) {
    const shown = `${status} ${printableCode(code)}, request_id ${quoted(requestId)}`;
    super(status === 0 ? "no answer" : shown, { cause });
  }

  /** Whether the same request may succeed later. */
  get isTemporary(): boolean {
    const isInProgress = this.status === 409 && this.code === "idempotency_in_progress";
    return this.status === 0 || TEMPORARY.has(this.status) || isInProgress;
  }
}

/** Return at most 80 characters of a JSON text in ASCII. */
function quoted(text: string | null): string {
  const escape = (unit: string) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(text).replaceAll(/[^\x20-\x7e]/g, escape).slice(0, 80);
}

/** Return a key source that reads a file, without white space at its ends. */
export function keyFile(path: string): () => Promise<string> {
  return async () => (await readFile(path, "utf8")).trim();
}

interface Prepared {
  url: string;
  method: string;
  path: string;
  body: string | undefined;
  headers: Record<string, string>;
}

export class Merchant {
  readonly #base: string;
  readonly #environment: Environment;
  readonly #source: () => string | Promise<string>;
  readonly #maxAttempts: number;
  readonly #deadlineMs: number;
  readonly #attemptTimeoutMs: number;
  readonly #sleep: (ms: number) => Promise<unknown>;
  readonly #fullBudget: number;
  #budget: number;
  #key: string | undefined;

  /** Throws RefusedError for a configuration that would disclose the key. */
  constructor(options: MerchantOptions) {
    const { key } = options;
    this.#base = readBaseUrl(options.baseUrl, options.environment);
    this.#environment = options.environment;
    this.#source = typeof key === "function" ? key : () => key;
    this.#maxAttempts = options.maxAttempts ?? 20;
    this.#fullBudget = this.#budget = RETRY_COST * (options.retryBudget ?? 100);
    this.#deadlineMs = options.deadlineMs ?? 60_000;
    this.#attemptTimeoutMs = options.attemptTimeoutMs ?? 20_000;
    this.#sleep = options.sleep ?? delay;
  }

  /** Send a request and return its success. Rejects with RefusedError before anything is sent, or with KeyvaultError. */
  async send(request: MerchantRequest): Promise<MerchantResponse> {
    const end = performance.now() + this.#deadlineMs;
    const prepared = this.#prepare(request);
    let key = await this.#current(request.path);
    let mayReload = true;
    for (let attempt = 1; ; attempt++) {
      const found = await this.#attempt(prepared, key, end - performance.now());
      if (!(found instanceof KeyvaultError)) {
        this.#budget = attempt === 1 ? Math.min(this.#fullBudget, this.#budget + 1) : this.#budget;
        return found;
      }
      if (found.status === 401 && mayReload && RELOADS.has(found.code ?? "")) {
        mayReload = false;
        const refused = key;
        key = await this.#reload(refused, request.path);
        if (key !== refused) {
          continue;
        }
      }
      const waitMs = Math.max(found.retryAfterSeconds * 1000, backoffMs(attempt));
      const isOver = attempt >= this.#maxAttempts || performance.now() + waitMs > end;
      if (!found.isTemporary || isOver || this.#budget < RETRY_COST) {
        throw found;
      }
      this.#budget -= RETRY_COST;
      await this.#sleep(waitMs);
    }
  }

  #prepare(request: MerchantRequest): Prepared {
    const { method, path, body, customerToken } = request;
    checkPath(path);
    const headers: Record<string, string> = { Accept: "application/json" };
    if (body !== undefined) {
      headers["Content-Type"] = "application/json";
    }
    if (customerToken !== undefined) {
      const { kind, scope } = kindAndScope(customerToken);
      if (kind !== "cat" || !isOfEnvironment(scope, this.#environment)) {
        throw new RefusedError("bearer", "The customer access token is not one of this environment.");
      }
      headers["Authorization"] = `Bearer ${customerToken}`;
    }
    const isCreating = method === "POST" || method === "PATCH";
    const idempotencyKey = request.idempotencyKey ?? (isCreating ? randomUUID() : undefined);
    if (idempotencyKey !== undefined) {
      if (!/^[\x20-\x7e]{1,255}$/.test(idempotencyKey)) {
        throw new RefusedError("idempotency_key", "The Idempotency-Key has not 1 to 255 printable ASCII characters.");
      }
      headers["Idempotency-Key"] = idempotencyKey;
    }
    return { url: this.#base + path, method, path, body, headers };
  }

  async #current(path: string): Promise<string> {
    return this.#checked(this.#key ?? (await this.#load()), path);
  }

  async #load(): Promise<string> {
    try {
      this.#key = await this.#source();
    } catch (error) {
      throw new RefusedError("key", `The key source failed: ${error instanceof Error ? error.message : "no reason"}`);
    }
    return this.#key;
  }

  /** Read the key again after a refusal, unless another call has done so already. */
  async #reload(refused: string, path: string): Promise<string> {
    return this.#checked(this.#key !== undefined && this.#key !== refused ? this.#key : await this.#load(), path);
  }

  #checked(key: string, path: string): string {
    const { kind, scope } = kindAndScope(key);
    if (kind !== "prv" && kind !== "pub") {
      throw new RefusedError("key", "The key source did not return an API key.");
    }
    if (!isOfEnvironment(scope, this.#environment)) {
      throw new RefusedError("environment", `The key is not of ${this.#environment}. Use that environment's key.`);
    }
    if (kind === "pub" && path !== "/client/configuration") {
      throw new RefusedError("kind", "The endpoint requires a private key, and the key is public.");
    }
    return key;
  }

  async #attempt(prepared: Prepared, key: string, leftMs: number): Promise<MerchantResponse | KeyvaultError> {
    const { url, method, body, headers } = prepared;
    let reply: Reply;
    try {
      const request = { method, headers: { ...headers, "X-Api-Key": key }, ...(body === undefined ? {} : { body }) };
      reply = await send(url, request, Math.max(1, Math.min(leftMs, this.#attemptTimeoutMs)));
    } catch (error) {
      return new KeyvaultError(0, null, null, null, 0, error);
    }
    if (reply.status < 200 || reply.status > 299) {
      return readError(reply);
    }
    if (reply.text === "") {
      return { status: reply.status, headers: reply.headers, json: null };
    }
    const isJson = /^application\/json(?:$|;)/i.test(reply.headers.get("content-type") ?? "");
    try {
      if (isJson) {
        return { status: reply.status, headers: reply.headers, json: JSON.parse(reply.text) };
      }
    } catch {
      // Reported below, without the text.
    }
    return new KeyvaultError(reply.status, null, null, null, 0, new Error("the answer is not JSON"));
  }
}

/** Refuse a path that servers could read differently, or that contains a key. */
function checkPath(path: string): void {
  if (!/^\/(?!\/)[\x21-\x7e]*$/.test(path) || /[\\#]/.test(path)) {
    throw new RefusedError("path", "The path is not valid. Use an absolute path of visible ASCII characters.");
  }
  let unescaped: string;
  try {
    unescaped = decodeURIComponent(path);
  } catch {
    throw new RefusedError("path", "The path has an invalid percent-encoding.");
  }
  if (hasKey(path) || hasKey(unescaped)) {
    throw new RefusedError("path", "The path contains a key. Logs and proxies store URLs.");
  }
  const route = decodeURIComponent(path.split("?", 1)[0] ?? "");
  if (route.split("/").some((segment) => segment === "." || segment === "..")) {
    throw new RefusedError("path", "The path contains a dot segment.");
  }
}

function readError(reply: Reply): KeyvaultError {
  const problem = readObject(reply.text) ?? {};
  const { code, check, request_id: requestId } = problem;
  return new KeyvaultError(
    reply.status,
    isText(code) ? code : null,
    Number.isInteger(check) ? (check as number) : null,
    isText(requestId) ? requestId : null,
    readRetryAfter(reply.headers.get("retry-after") ?? ""),
  );
}

/** Return the seconds of a number or an HTTP date (RFC 9110, 10.2.3); 0 for other text and past dates. */
function readRetryAfter(text: string): number {
  if (WHOLE_SECONDS.test(text)) {
    return Number(text);
  }
  const at = / GMT$/.test(text) ? Date.parse(text) : Number.NaN;
  return Number.isNaN(at) ? 0 : Math.max(0, (at - Date.now()) / 1000);
}

/** Return a random wait before the retry with this number, from 1: exponential, with full jitter. */
function backoffMs(retry: number): number {
  return Math.random() * Math.min(BACKOFF_CAP_MS, BACKOFF_BASE_MS * 2 ** (retry - 1));
}
