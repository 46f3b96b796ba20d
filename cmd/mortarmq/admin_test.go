package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// adminAnswers is what a broker's admin interface says, by path and query.
var adminAnswers = map[string]string{
	"/topics": `[{"name":"events","partitions":1,"state":"deleting","created_epoch":9,"id":2},
		{"name":"orders","partitions":12,"state":"active","created_epoch":3,"id":1,"durability":"quorum","unknown":true}]`,
	"/groups": `[{"group":"billing","topic":"events","lag":0,"state":"empty"},
		{"group":"billing","topic":"orders","lag":17,"state":"stable","in_flight":2},{"group":"mail","topic":"orders","lag":5,"state":"stable"}]`,
	"/groups?topic=orders":         `[{"group":"billing","topic":"orders","lag":17,"state":"stable"}]`,
	"/groups?topic=none":           `[]`,
	"/groups/billing?topic=events": `[]`,
	"/groups/billing?topic=orders": `[{"member":41,"assignment_epoch":7,"ownership_epoch":18446744073709551615,"lag":17,"connected":true}]`,
	"/groups/mail": `[{"member":1,"assignment_epoch":2,"ownership_epoch":3,"lag":4},
		{"member":5,"assignment_epoch":6,"ownership_epoch":7,"lag":8}]`,
	"/groups/a%2Fb%3F": `[]`,
	"/leader":          `{"leader_id":0,"leader_epoch":12,"quorum_state":"healthy"}`,
	"/broker":          `{"node_id":0,"uptime_s":3601,"connections":14,"version":"v0.1.0","io_backend":"pread","io_reason":"kernel too old","healthy":true}`,
}

func startAdmin(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RequestURI() == "/groups/billing" {
			http.Error(w, "several topics have a group of this name", http.StatusConflict)
			return
		}
		answer, ok := adminAnswers[r.URL.RequestURI()]
		if !ok {
			http.Error(w, "there is no such thing", http.StatusNotFound)
			return
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// The columns of the reading commands, and their order, are a contract.
func TestAdmin_GoldenColumns(t *testing.T) {
	t.Setenv(envAdmin, startAdmin(t))
	for _, c := range []struct{ args, tsv, json string }{
		{"topics list", "events\t1\tdeleting\t9\norders\t12\tactive\t3\n",
			`[{"name":"events","partitions":1,"state":"deleting","created_epoch":9},{"name":"orders","partitions":12,"state":"active","created_epoch":3}]`},
		{"groups list", "billing\tevents\t0\tempty\nbilling\torders\t17\tstable\nmail\torders\t5\tstable\n",
			`[{"group":"billing","topic":"events","lag":0,"state":"empty"},{"group":"billing","topic":"orders","lag":17,"state":"stable"},{"group":"mail","topic":"orders","lag":5,"state":"stable"}]`},
		{"groups list --topic orders", "billing\torders\t17\tstable\n", `[{"group":"billing","topic":"orders","lag":17,"state":"stable"}]`},
		{"groups list --topic none", "", `[]`},
		{"groups describe mail", "1\t2\t3\t4\n5\t6\t7\t8\n",
			`[{"member":1,"assignment_epoch":2,"ownership_epoch":3,"lag":4},{"member":5,"assignment_epoch":6,"ownership_epoch":7,"lag":8}]`},
		{"groups describe billing --topic orders", "41\t7\t18446744073709551615\t17\n",
			`[{"member":41,"assignment_epoch":7,"ownership_epoch":18446744073709551615,"lag":17}]`},
		{"groups describe billing --topic events", "", `[]`},
		{"groups describe a/b?", "", `[]`},
		{"leader get", "0\t12\thealthy\n", `{"leader_id":0,"leader_epoch":12,"quorum_state":"healthy"}`},
		{"broker status", "0\t3601\t14\tv0.1.0\n", `{"node_id":0,"uptime_s":3601,"connections":14,"version":"v0.1.0","io_backend":"pread","io_reason":"kernel too old"}`},
	} {
		t.Run(c.args, func(t *testing.T) {
			args := strings.Fields(c.args)
			mortarmq(t, "", args...).want(t, exitDone, c.tsv)
			r := mortarmq(t, "", append(args, "--json")...)
			r.want(t, exitDone, c.json+"\n")
			if !json.Valid([]byte(r.stdout)) {
				t.Errorf("no JSON: %s", r.stdout)
			}
		})
	}
}

func TestAdmin_RefusalsSayWhatToDo(t *testing.T) {
	t.Setenv(envAdmin, startAdmin(t))
	for _, c := range []struct {
		args  string
		code  int
		about string
	}{
		{"groups describe nobody", exitRefused, "groups list"},
		{"groups describe billing", exitUsage, "--topic"},
		{"groups describe mail --topic events", exitRefused, `of topic "events"`},
		{"groups list --topic other", exitRefused, "no such thing"},
	} {
		r := mortarmq(t, "", strings.Fields(c.args)...)
		r.want(t, c.code, "")
		if !strings.Contains(r.stderr, c.about) {
			t.Errorf("%s: the error does not name %q: %s", c.args, c.about, r.stderr)
		}
	}
}

func TestAdmin_OtherServersAreNotTrusted(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		body   string
		code   int
	}{
		{"no JSON", http.StatusOK, "<html>", exitRefused},
		{"other JSON", http.StatusOK, `"hello"`, exitRefused},
		{"an error page", http.StatusInternalServerError, strings.Repeat("x", 10_000), exitRefused},
		{"busy", http.StatusServiceUnavailable, "the broker does not answer", exitUnreachable},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(c.status)
				_, _ = w.Write([]byte(c.body))
			}))
			defer s.Close()
			r := mortarmq(t, "", "topics", "list", "--admin", s.URL)
			r.want(t, c.code, "")
			if len(r.stderr) > 1000 {
				t.Errorf("the error has %d bytes", len(r.stderr))
			}
		})
	}
}
