"""Views of the service plane: parse a request, call a service, render the response."""
