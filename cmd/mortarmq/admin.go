package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"
)

// maxAdminBody bounds an answer of the admin interface, in bytes.
const maxAdminBody = 64 << 20

// adminURL returns the address of a resource of the admin interface. path is escaped.
func (a *app) adminURL(path string, query url.Values) (string, error) {
	host := strings.TrimSuffix(strings.TrimPrefix(a.admin, "http://"), "/")
	if _, _, err := net.SplitHostPort(host); err != nil {
		return "", usagef("--admin is %q: it must be host:port, such as %s", a.admin, defaultAdmin)
	}
	u := "http://" + host + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	return u, nil
}

var (
	// errNotFound means that the admin interface knows no such thing, errAmbiguous that it knows several.
	errNotFound  = errors.New("not found")
	errAmbiguous = errors.New("ambiguous")
)

// fetch gets a resource of the admin interface, at an escaped path, into v. Unknown members of the answer are ignored: newer brokers say more.
func (a *app) fetch(ctx context.Context, path string, query url.Values, v any) error {
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	target, err := a.adminURL(path, query)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return usagef("--admin: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if errors.Is(err, context.Canceled) {
			return errInterrupted
		}
		return unreachablef("%w: is a broker's admin interface there? --admin or %s names another one", err, envAdmin)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminBody+1))
	if err != nil {
		return unreachablef("reading the answer of %s: %w", target, err)
	}
	switch {
	case resp.StatusCode == http.StatusNotFound:
		return refusedf("%w: %s", errNotFound, adminMessage(body, resp.Status))
	case resp.StatusCode == http.StatusConflict:
		return refusedf("%w: %s", errAmbiguous, adminMessage(body, resp.Status))
	case resp.StatusCode == http.StatusServiceUnavailable:
		return unreachablef("%s answers %s", target, adminMessage(body, resp.Status))
	case resp.StatusCode != http.StatusOK:
		return refusedf("%s answers %s", target, adminMessage(body, resp.Status))
	case len(body) > maxAdminBody:
		return refusedf("%s answers with more than %d bytes", target, maxAdminBody)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return refusedf("%s is no MortarMQ admin interface, or one of another version: %w", target, err)
	}
	return nil
}

// adminMessage is what an answer that is no success says.
func adminMessage(body []byte, status string) string {
	if text := strings.TrimSpace(string(body)); text != "" && len(text) <= maxAdminError && utf8.ValidString(text) {
		return fmt.Sprintf("%s: %s", status, text)
	}
	return status
}

// maxAdminError is the longest text of an error that is passed on, in bytes.
const maxAdminError = 512
