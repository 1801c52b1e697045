package keyvault

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// maxUserAgent is the longest user agent that the service accepts, in characters.
const maxUserAgent = 8192

// ProtectOptions change what Protect asks.
type ProtectOptions struct {
	// Endpoint is the name of the endpoint in the catalog, instead of the request's method and path. The service then
	// does not see the URL, and cannot refuse a key in it.
	Endpoint string
	// TrustedProxies is the number of your own proxies that append to X-Forwarded-For; 0 uses the peer's address.
	TrustedProxies int
	// Question may add to the question, for example the merchant or the store that the request names.
	Question func(*http.Request, *Question)
}

type identityKey struct{}

// IdentityOf returns the identity of the request that the context belongs to. It is false outside of Protect.
func IdentityOf(ctx context.Context) (Identity, bool) {
	identity, found := ctx.Value(identityKey{}).(Identity)
	return identity, found
}

// Protect returns a handler that calls next only for requests that the service allows, and answers all others. Wrap the
// whole router with it: the service must check the path as the client sent it.
func (v *Verifier) Protect(next http.Handler) http.Handler {
	return v.ProtectWith(ProtectOptions{}, next)
}

// ProtectWith is Protect with options.
func (v *Verifier) ProtectWith(options ProtectOptions, next http.Handler) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		question := describe(request, options)
		if options.Question != nil {
			options.Question(request, &question)
		}
		decision := v.Verify(request.Context(), question)
		for name, values := range decision.Header {
			response.Header()[name] = values
		}
		if !decision.Allowed {
			response.WriteHeader(decision.Status)
			_, _ = response.Write(decision.Body)
			return
		}
		ctx := context.WithValue(request.Context(), identityKey{}, decision.Identity)
		next.ServeHTTP(response, request.WithContext(ctx))
	})
}

func describe(request *http.Request, options ProtectOptions) Question {
	question := Question{
		Key:       secretOf(joined(request, "X-Api-Key")),
		Endpoint:  options.Endpoint,
		ClientIP:  clientAddress(request, options.TrustedProxies),
		Origin:    joined(request, "Origin"),
		UserAgent: firstCharacters(request.UserAgent(), maxUserAgent),
	}
	if options.Endpoint == "" {
		question.Method, question.Path = request.Method, request.RequestURI
		if !strings.HasPrefix(question.Path, "/") {
			question.Path = request.URL.RequestURI()
		}
	}
	if authorization := joined(request, "Authorization"); authorization != nil {
		scheme, token, _ := strings.Cut(*authorization, " ")
		if !strings.EqualFold(scheme, "bearer") {
			token = "" // no customer's: the service refuses it
		}
		token = strings.Trim(token, " ")
		question.CustomerToken = secretOf(&token)
	}
	return question
}

// joined returns the values of a header, joined with a comma, which the service refuses in a credential. Nil without one.
func joined(request *http.Request, name string) *string {
	values := request.Header.Values(name)
	if len(values) == 0 {
		return nil
	}
	text := strings.Join(values, ",")
	return &text
}

func secretOf(text *string) *Secret {
	if text == nil {
		return nil
	}
	secret := Secret(*text)
	return &secret
}

func firstCharacters(text string, count int) string {
	if len(text) <= count {
		return text
	}
	if characters := []rune(text); len(characters) > count {
		return string(characters[:count])
	}
	return text
}

// clientAddress returns the peer's address, or behind n trusted proxies the n-th last entry of X-Forwarded-For. It is
// empty if that is no address.
func clientAddress(request *http.Request, trustedProxies int) string {
	text := request.RemoteAddr
	if trustedProxies > 0 {
		entries := strings.Split(strings.Join(request.Header.Values("X-Forwarded-For"), ","), ",")
		if len(entries) < trustedProxies {
			return ""
		}
		text = strings.Trim(entries[len(entries)-trustedProxies], " \t")
	}
	if host, _, err := net.SplitHostPort(text); err == nil {
		text = host
	}
	address, err := netip.ParseAddr(strings.Trim(text, "[]"))
	if err != nil || address.Zone() != "" {
		return ""
	}
	return address.Unmap().String()
}
