"use strict";

// No validator badge: it would send the page to somebody else's server.
SwaggerUIBundle({
  url: document.getElementById("docs").dataset.page,
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
});
