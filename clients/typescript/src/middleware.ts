/** Middleware for fetch handlers, Express and Hono. It uses none of their packages. */

import type { IncomingMessage, ServerResponse } from "node:http";
import { isIP } from "node:net";

import type { Decision, Identity, Question, Verifier } from "./verifier.js";

/** Longest user agent that the service accepts, in characters. */
const MAX_USER_AGENT = 8192;

/** `Source` is the request of the framework: an IncomingMessage, a Request, or a context of Hono. */
export interface ProtectOptions<Source> {
  /**
   * Name of the endpoint in the catalog, instead of the request's method and path. The service then does not see the
   * URL, and cannot refuse a key in it.
   */
  endpoint?: string;
  /** Number of your own proxies that append to X-Forwarded-For; 0, the default, uses the peer's address. */
  trustedProxies?: number;
  /** Return the peer's address. A fetch handler has none of its own. */
  peerAddress?: (source: Source) => string | undefined;
  /** Return additions to the question, for example the merchant or the store that the request names. */
  question?: (source: Source) => Partial<Question>;
}

const identities = new WeakMap<object, Identity>();

/** Return the identity of a protected request: the IncomingMessage of Express, the Request of a fetch handler or Hono. */
export function identityOf(request: object): Identity | undefined {
  return identities.get(request);
}

// --- Express ------------------------------------------------------------------------------------------------------

/** Return middleware for `app.use`. Use it on the whole application, before a router. */
export function expressMiddleware(verifier: Verifier, options: ProtectOptions<IncomingMessage> = {}) {
  return async (
    request: IncomingMessage & { originalUrl?: string },
    response: ServerResponse,
    next: () => void,
  ): Promise<void> => {
    const described = describe(
      request.method ?? "",
      request.originalUrl ?? request.url ?? "",
      (name) => request.headersDistinct[name]?.join(","),
      options.peerAddress === undefined ? request.socket.remoteAddress : options.peerAddress(request),
      options,
    );
    const decision = await verifier.verify({ ...described, ...options.question?.(request) });
    for (const [name, value] of Object.entries(decision.headers)) {
      response.setHeader(name, value);
    }
    if (decision.allowed) {
      identities.set(request, decision.identity);
      next();
      return;
    }
    response.statusCode = decision.status;
    response.end(decision.body);
  };
}

// --- fetch handlers -------------------------------------------------------------------------------------------------

/** Return a fetch handler that calls `handler` only for requests that the service allows. */
export function protect<Rest extends unknown[]>(
  verifier: Verifier,
  handler: (request: Request, ...rest: Rest) => Response | Promise<Response>,
  options: ProtectOptions<Request> = {},
) {
  return async (request: Request, ...rest: Rest): Promise<Response> => {
    const described = describeFetch(request, options.peerAddress?.(request), options);
    const decision = await verifier.verify({ ...described, ...options.question?.(request) });
    if (!decision.allowed) {
      return refusal(decision);
    }
    identities.set(request, decision.identity);
    const response = await handler(request, ...rest);
    const answer = new Response(response.body, response); // The headers of a response may be immutable.
    for (const [name, value] of Object.entries(decision.headers)) {
      answer.headers.set(name, value);
    }
    return answer;
  };
}

function refusal(decision: Decision & { allowed: false }): Response {
  return new Response(decision.body, { status: decision.status, headers: decision.headers });
}

// --- Hono ---------------------------------------------------------------------------------------------------------

/** What the middleware uses of Hono's context. `env.incoming` is the IncomingMessage of @hono/node-server. */
export interface HonoContext {
  req: { raw: Request };
  env: unknown;
  header(name: string, value: string): void;
}

/** Return middleware for `app.use`. */
export function honoMiddleware(verifier: Verifier, options: ProtectOptions<HonoContext> = {}) {
  return async (context: HonoContext, next: () => Promise<void>): Promise<Response | void> => {
    const peer = options.peerAddress === undefined ? nodePeer(context) : options.peerAddress(context);
    const described = describeFetch(context.req.raw, peer, options);
    const decision = await verifier.verify({ ...described, ...options.question?.(context) });
    if (!decision.allowed) {
      return refusal(decision);
    }
    identities.set(context.req.raw, decision.identity);
    for (const [name, value] of Object.entries(decision.headers)) {
      context.header(name, value);
    }
    await next();
  };
}

function nodePeer(context: HonoContext): string | undefined {
  const env = context.env as { incoming?: IncomingMessage } | undefined;
  return env?.incoming?.socket?.remoteAddress;
}

// --- the question ---------------------------------------------------------------------------------------------------

type Shape = Pick<ProtectOptions<never>, "endpoint" | "trustedProxies">;

function describeFetch(request: Request, peer: string | undefined, options: Shape): Question {
  const url = new URL(request.url);
  // `get` joins repeated headers with a comma and a space.
  const read = (name: string) => request.headers.get(name)?.replaceAll(/, */g, ",");
  return describe(request.method, url.pathname + url.search, read, peer, options);
}

/** Describe a request. `read` joins repeated headers with a comma, which the service refuses in a credential. */
function describe(
  method: string,
  path: string,
  read: (name: string) => string | undefined,
  peer: string | undefined,
  options: Shape,
): Question {
  const question: Question = { key: read("x-api-key") ?? null };
  if (options.endpoint === undefined) {
    Object.assign(question, { method, path });
  } else {
    question.endpoint = options.endpoint;
  }
  const authorization = read("authorization");
  if (authorization !== undefined) {
    // Another scheme than Bearer is no customer's: the service refuses the empty token.
    const [, token = ""] = /^bearer (.*)$/i.exec(authorization) ?? [];
    question.customer_token = token.replaceAll(/^ +| +$/g, "");
  }
  const address = clientAddress(peer, read("x-forwarded-for"), options.trustedProxies ?? 0);
  if (address !== undefined) {
    question.client_ip = address;
  }
  const origin = read("origin");
  if (origin !== undefined) {
    question.origin = origin;
  }
  const agent = read("user-agent");
  if (agent !== undefined) {
    question.user_agent = agent.slice(0, MAX_USER_AGENT);
  }
  return question;
}

/** Return the peer's address, or behind n trusted proxies the n-th last entry of X-Forwarded-For. */
function clientAddress(peer: string | undefined, forwarded: string | undefined, proxies: number): string | undefined {
  const text = (proxies === 0 ? peer : (forwarded ?? "").split(",").at(-proxies)) ?? "";
  const [, bracketed, port] = /^\s*(?:\[([^\]]*)\](?::[0-9]+)?|([0-9.]+):[0-9]+)\s*$/.exec(text) ?? [];
  const address = (bracketed ?? port ?? text).trim().replace(/^::ffff:(?=[0-9.]+$)/i, "");
  return isIP(address) === 0 || address.includes("%") ? undefined : address;
}
