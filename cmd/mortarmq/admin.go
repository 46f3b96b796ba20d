package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/mortarmq/mortarmq/client"
)

// maxAdminBody bounds an answer of the admin interface, in bytes.
const maxAdminBody = 64 << 20

// adminHosts returns the addresses of --admin, with the default port where one has none.
func (a *app) adminHosts() ([]string, error) {
	var hosts []string
	for text := range strings.SplitSeq(a.admin, ",") {
		host := strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(text), "http://"), "/")
		if host == "" {
			continue
		}
		full, err := client.CompleteAddr(host, defaultAdminPort)
		if err != nil {
			return nil, usagef("--admin: %w", err)
		}
		hosts = append(hosts, full)
	}
	if len(hosts) == 0 {
		return nil, usagef("--admin is empty: it must be host:port, such as %s", defaultAdmin)
	}
	return hosts, nil
}

// errNotFound means that the admin interface knows no such thing.
var errNotFound = errors.New("not found")

// fetch gets a resource of the admin interface, at an escaped path, into v: from the first of the nodes that answers. Unknown
// members of the answer are ignored: newer brokers say more.
func (a *app) fetch(ctx context.Context, path string, query url.Values, v any) error {
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	hosts, err := a.adminHosts()
	if err != nil {
		return err
	}
	var problems []string
	for _, host := range hosts {
		target := "http://" + host + path
		if len(query) > 0 {
			target += "?" + query.Encode()
		}
		body, err := getAdmin(ctx, target)
		var f *failure
		switch {
		case err == nil:
			if err := json.Unmarshal(body, v); err != nil {
				return refusedf("%s is no MortarMQ admin interface, or one of another version: %w", host, err)
			}
			return nil
		case errors.As(err, &f):
			return err
		}
		problems = append(problems, err.Error())
	}
	return unreachablef("%s", strings.Join(problems, "; "))
}

// fetchNewest is fetch that prefers the leader's answer where several nodes are named, and takes any other one's if none
// leads.
func (a *app) fetchNewest(ctx context.Context, path string, query url.Values, v any) error {
	if hosts, err := a.adminHosts(); err != nil || len(hosts) == 1 {
		return a.fetch(ctx, path, query, v)
	}
	leaders := maps.Clone(query)
	leaders.Set("leader", "required")
	err := a.fetch(ctx, path, leaders, v)
	if f := (*failure)(nil); errors.As(err, &f) && f.code == exitUnreachable {
		return a.fetch(ctx, path, query, v)
	}
	return err
}

// getAdmin gets what is at target. An error that is no *failure is that of a node that can't tell; another one may.
func getAdmin(ctx context.Context, target string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, usagef("--admin: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	switch {
	case errors.Is(err, context.Canceled):
		return nil, errInterrupted
	case err != nil && strings.Contains(err.Error(), "malformed HTTP"):
		return nil, unreachablef("%s does not answer in HTTP: is that the client port (%s)? --admin or %s wants the admin port, %s by default",
			req.URL.Host, client.DefaultPort, envAdmin, defaultAdminPort)
	case err != nil:
		return nil, fmt.Errorf("%w: is a broker's admin interface there? --admin or %s names another one", err, envAdmin)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminBody+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the answer of %s: %w", target, err)
	case resp.StatusCode == http.StatusNotFound:
		return nil, refusedf("%w: %s", errNotFound, adminMessage(body, resp.Status))
	case resp.StatusCode == http.StatusServiceUnavailable, resp.StatusCode == http.StatusMisdirectedRequest:
		return nil, fmt.Errorf("%s answers %s", target, adminMessage(body, resp.Status))
	case resp.StatusCode != http.StatusOK:
		return nil, refusedf("%s answers %s", target, adminMessage(body, resp.Status))
	case len(body) > maxAdminBody:
		return nil, refusedf("%s answers with more than %d bytes", target, maxAdminBody)
	}
	return body, nil
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
