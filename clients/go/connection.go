package keyvault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
)

// Environment is the environment of a credential.
type Environment string

// The two environments.
const (
	Sandbox    Environment = "sandbox"
	Production Environment = "production"
)

var scopes = map[Environment]string{Sandbox: "sbx", Production: "prd"}

// maxReplyBytes bounds the body of a reply. The service's largest reply is smaller.
const maxReplyBytes = 1 << 20

// Refusal says what a client refused to send.
type Refusal string

// The reasons for a refusal.
const (
	RefusedBaseURL        Refusal = "base_url"
	RefusedEnvironment    Refusal = "environment"
	RefusedKey            Refusal = "key"
	RefusedKind           Refusal = "kind"
	RefusedBearer         Refusal = "bearer"
	RefusedPath           Refusal = "path"
	RefusedIdempotencyKey Refusal = "idempotency_key"
)

// RefusedError is returned before anything is sent.
type RefusedError struct {
	Refusal Refusal
	Detail  string
}

func (e *RefusedError) Error() string { return "keyvault: " + e.Detail }

func refuse(refusal Refusal, format string, values ...any) error {
	return &RefusedError{refusal, fmt.Sprintf(format, values...)}
}

// parseBaseURL accepts https, and http on a loopback address.
func parseBaseURL(text string) (*url.URL, error) {
	const accepted = "Use https://, or http:// on a loopback address."
	if text == "" {
		return nil, refuse(RefusedBaseURL, "the base URL is empty. %s", accepted)
	}
	base, err := url.Parse(text)
	if err != nil || base.Host == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "" {
		return nil, refuse(RefusedBaseURL, "the base URL is not valid. %s", accepted)
	}
	if base.Scheme != "https" && (base.Scheme != "http" || !isLoopback(base.Hostname())) {
		return nil, refuse(RefusedBaseURL, "the base URL would send credentials in clear text. %s", accepted)
	}
	base.Path = strings.TrimSuffix(base.Path, "/")
	return base, nil
}

func isLoopback(host string) bool {
	address, err := netip.ParseAddr(host)
	return host == "localhost" || (err == nil && address.IsLoopback())
}

// checkEnvironment compares the configured environment with the last segment of the base URL.
func checkEnvironment(environment Environment, base *url.URL) error {
	if _, known := scopes[environment]; !known {
		return refuse(RefusedEnvironment, "unknown environment %q. Use \"sandbox\" or \"production\".", environment)
	}
	named := Environment(path.Base(base.Path))
	if _, isNamed := scopes[named]; isNamed && named != environment {
		return refuse(RefusedEnvironment, "the base URL is that of %s, and the client is for %s.", named, environment)
	}
	return nil
}

// newHTTPClient returns a client that follows no redirect. socket is the path of a Unix socket, or empty.
func newHTTPClient(socket string) *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = transport.MaxIdleConns
	if socket != "" {
		transport.Proxy = nil
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}
	}
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// send returns the reply with its whole body, or an error without the request's URL and headers.
func send(client *http.Client, request *http.Request) (*http.Response, []byte, error) {
	reply, err := client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err
		}
		return nil, nil, err
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(io.LimitReader(reply.Body, maxReplyBytes+1))
	if err != nil {
		return nil, nil, err
	}
	if len(body) > maxReplyBytes {
		return nil, nil, fmt.Errorf("the reply is larger than %d bytes", maxReplyBytes)
	}
	return reply, body, nil
}
