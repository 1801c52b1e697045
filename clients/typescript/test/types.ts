/** Not run: the compiler checks that the middleware fits Hono, node:http and fetch handlers. */

import { createServer } from "node:http";

import { Hono } from "hono";

import { type Identity, Verifier, expressMiddleware, honoMiddleware, identityOf, protect } from "../dist/index.js";

const verifier = new Verifier({ url: "https://keyvault.example", environment: "sandbox", serviceToken: "" });

const app = new Hono();
app.use(honoMiddleware(verifier));
app.get("/", (context) => context.json({ merchant: identityOf(context.req.raw)?.merchantId }));

const handler = protect(verifier, (request: Request, name: string) => new Response(identityOf(request)?.merchantId ?? name));
export const answer: Promise<Response> = handler(new Request("http://localhost"), "nobody");

const middleware = expressMiddleware(verifier, { question: (request) => ({ merchant: request.headers.host ?? "" }) });
createServer((request, response) => void middleware(request, response, () => response.end()));

export const identity: Identity | undefined = identityOf(new Request("http://localhost"));
