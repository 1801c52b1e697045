/** Ask the service whether a request is allowed. */

import {
  type Environment,
  type Reply,
  RefusedError,
  WHOLE_SECONDS,
  isObject,
  isText,
  kindAndScope,
  printableCode,
  readBaseUrl,
  readObject,
  send,
} from "./connection.js";

export interface VerifierOptions {
  /** Address of the service, such as https://keyvault.internal. */
  url: string;
  /** Environment of the keys that this service accepts. */
  environment: Environment;
  /** A service token with the permission keys:verify. */
  serviceToken: string;
  /** Deadline of a question, in milliseconds; 2,000 by default. */
  timeoutMs?: number;
  /** Called for each question without a decision; writes a warning to the console by default. */
  onUndecided?: (cause: Error) => void;
}

/** A request for an endpoint. Give `endpoint`, or `method` and `path`; the path with the query, as received. */
export interface Question {
  key: string | null;
  endpoint?: string;
  method?: string;
  path?: string;
  merchant?: string;
  store?: string;
  customer_token?: string;
  client_ip?: string;
  origin?: string;
  user_agent?: string;
  cost?: number;
}

/** What the service proved about the caller of an allowed request. */
export interface Identity {
  keyId: string;
  credentialId: string;
  kind: "private" | "public";
  merchantId: string;
  environment: Environment;
  customerId: string | null;
}

/** The answer to give to the client. `headers` belong to the response of an allowed request, too. */
export type Decision =
  | { allowed: true; identity: Identity; headers: Record<string, string> }
  | {
      allowed: false;
      status: number;
      headers: Record<string, string>;
      /** A problem document. */
      body: string;
      code: string;
      /** Why there is no decision of the service; undefined if there is one. */
      cause?: Error;
    };

const PROBLEM_TYPE = "application/problem+json";

const HEADER_NAME = /^[A-Za-z0-9-]{1,64}$/;
const HEADER_VALUE = /^[\x20-\x7e]{0,4096}$/;

/** Asks the service. Reuses connections. */
export class Verifier {
  readonly #url: string;
  readonly #environment: Environment;
  readonly #token: string;
  readonly #timeoutMs: number;
  readonly #onUndecided: (cause: Error) => void;

  /** Throws RefusedError for a configuration that would disclose the token. */
  constructor(options: VerifierOptions) {
    this.#url = `${readBaseUrl(options.url, options.environment)}/v1/keys/verify`;
    if (kindAndScope(options.serviceToken).kind !== "svc") {
      throw new RefusedError("key", "The service token is not one. A service token begins like kv_svc_.");
    }
    this.#environment = options.environment;
    this.#token = options.serviceToken;
    this.#timeoutMs = options.timeoutMs ?? 2_000;
    this.#onUndecided = options.onUndecided ?? ((cause) => console.warn(`keyvault: no decision: ${cause.message}`));
  }

  /** Ask the service. Fails closed: without a complete decision before the deadline the answer is a 503. */
  async verify(question: Question): Promise<Decision> {
    let reply: Reply;
    try {
      reply = await this.#ask(question);
    } catch (error) {
      return this.#undecided(503, "1", error instanceof Error ? error : new Error("no reply"));
    }
    if (reply.status === 200) {
      const decision = readDecision(reply.text, this.#environment);
      return decision ?? this.#undecided(503, "1", new Error("the decision is not complete"));
    }
    const code = readObject(reply.text)?.["code"];
    const cause = new Error(`the service answered ${reply.status} ${printableCode(code)}`);
    // The question is well-formed, so these concern the client's method, path or headers.
    if (code === "request_invalid" || code === "payload_too_large") {
      return this.#undecided(400, undefined, cause);
    }
    const retryAfter = reply.headers.get("retry-after") ?? "";
    return this.#undecided(503, reply.status === 503 && WHOLE_SECONDS.test(retryAfter) ? retryAfter : "1", cause);
  }

  #ask(question: Question): Promise<Reply> {
    const request = {
      method: "POST",
      headers: { Authorization: `Bearer ${this.#token}`, "Content-Type": "application/json" },
      body: JSON.stringify({ ...question, environment: this.#environment }),
    };
    return send(this.#url, request, this.#timeoutMs);
  }

  /** Return a refusal of our own: the client learns neither the cause nor anything about the service token. */
  #undecided(status: 400 | 503, retryAfter: string | undefined, cause: Error): Decision {
    this.#onUndecided(cause);
    const [code, title, detail] =
      status === 400
        ? ["request_invalid", "Request invalid", "The method, the path or a header is invalid or too long."]
        : ["dependency_unavailable", "Dependency unavailable", "The request cannot be verified now. Try again."];
    const body = JSON.stringify({ type: `urn:keyvault:problem:${code}`, title, status, code, detail });
    const headers: Record<string, string> = { "Content-Type": PROBLEM_TYPE, "Cache-Control": "no-store" };
    if (retryAfter !== undefined) {
      headers["Retry-After"] = retryAfter;
    }
    return { allowed: false, status, headers, body, code: code as string, cause };
  }
}

/** Return the service's decision, or undefined unless it is complete and consistent. */
function readDecision(text: string, environment: Environment): Decision | undefined {
  const found = readObject(text);
  const headers = readHeaders(found?.["headers"]);
  if (found === undefined || headers === undefined) {
    return undefined;
  }
  if (found["allowed"] === true) {
    const identity = readIdentity(found, environment);
    return found["status"] === 200 && identity !== undefined ? { allowed: true, identity, headers } : undefined;
  }
  const { status, code, problem, request_id: requestId } = found;
  const isRefusal = typeof status === "number" && Number.isInteger(status) && status >= 400 && status <= 599;
  if (found["allowed"] !== false || !isRefusal || !isObject(problem) || !isText(code)) {
    return undefined;
  }
  headers["Content-Type"] = PROBLEM_TYPE;
  if (isText(requestId) && HEADER_VALUE.test(requestId)) {
    headers["X-Request-Id"] = requestId;
  }
  return { allowed: false, status, headers, body: JSON.stringify(problem), code };
}

/** Return the headers for the client, or undefined if one of them cannot be sent. */
function readHeaders(found: unknown): Record<string, string> | undefined {
  if (!isObject(found)) {
    return undefined;
  }
  const headers: Record<string, string> = {};
  for (const [name, value] of Object.entries(found)) {
    if (!HEADER_NAME.test(name) || typeof value !== "string" || !HEADER_VALUE.test(value)) {
      return undefined;
    }
    headers[name] = value;
  }
  return headers;
}

function readIdentity(found: Record<string, unknown>, environment: Environment): Identity | undefined {
  const { key_id: keyId, credential_id: credentialId, kind, merchant_id: merchantId, customer_id: customerId } = found;
  const isKind = kind === "private" || kind === "public";
  if (!isText(keyId) || !isText(credentialId) || !isText(merchantId) || !isKind) {
    return undefined;
  }
  if (found["environment"] !== environment || !(customerId === null || isText(customerId))) {
    return undefined;
  }
  return { keyId, credentialId, kind, merchantId, environment, customerId };
}
