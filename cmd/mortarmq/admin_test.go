package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

// adminAnswers is what a broker's admin interface says, by path and query.
var adminAnswers = map[string]string{
	"/topics": `[{"name":"events","partitions":1,"state":"deleting","created_epoch":9,"id":2},
		{"name":"orders","partitions":12,"state":"active","created_epoch":3,"id":1,"durability":"quorum","unknown":true}]`,
	"/groups": `[{"group":"billing","topic":"events","lag":0,"state":"empty"},
		{"group":"billing","topic":"orders","lag":17,"state":"stable","in_flight":2},{"group":"mail","topic":"orders","lag":5,"state":"stable"}]`,
	"/groups?topic=orders": `[{"group":"billing","topic":"orders","lag":17,"state":"stable"}]`,
	"/groups?topic=none":   `[]`,
	"/stats?group=mail&leader=required": `{"topics":[],"groups":[{"group":"mail","topic":"orders","state":"stable","lag":8,"members":[
		{"member":1,"assignment_epoch":2,"ownership_epoch":3,"lag":4,"connected":true},{"member":5,"assignment_epoch":6,"ownership_epoch":7,"lag":8}]}]}`,
	"/stats?group=billing&leader=required": `{"topics":[],"groups":[{"group":"billing","topic":"events"},{"group":"billing","topic":"orders"}]}`,
	"/stats?group=billing&leader=required&topic=orders": `{"topics":[],"groups":[{"group":"billing","topic":"orders","state":"stable","lag":17,"in_flight":2,
		"settings":{"strategy":"sticky","max_attempts":5,"ordered":false,"retry_delays_ms":[
			1000,
			5000 ]},
		"members":[{"member":41,"assignment_epoch":7,"ownership_epoch":18446744073709551615,"lag":17,"connected":true}]}]}`,
	"/stats?group=billing&leader=required&topic=events": `{"topics":[],"groups":[{"group":"billing","topic":"events","state":"empty"}]}`,
	"/stats?group=mail&leader=required&topic=events":    `{"topics":[{"name":"events"}],"groups":[]}`,
	"/stats?group=a%2Fb%3F&leader=required":             `{"topics":[],"groups":[{"group":"a/b?","topic":"events","state":"empty"}]}`,
	"/stats?leader=required&topic=orders": `{"topics":[{"name":"orders","id":1,"state":"active","partitions":2,"durability":"quorum","created_epoch":3,"produced":9,"bytes":90,
		"partition_stats":[{"partition":0,"first_seq":1,"last_seq":7,"depth":4},{"partition":1,"first_seq":0,"last_seq":0,"depth":0}]}],
		"groups":[{"group":"billing","topic":"orders","state":"stable","lag":4,"members":[{"member":41,"connected":true},{"member":42}]}]}`,
	"/leader": `{"leader_id":0,"leader_epoch":12,"quorum_state":"healthy"}`,
	"/broker": `{"node_id":0,"uptime_s":3601,"connections":14,"version":"v0.1.0","io_backend":"pread","io_reason":"kernel too old","healthy":true}`,
}

func startAdmin(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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
		{"groups describe billing --topic orders --settings", "max_attempts\t5\nordered\tfalse\nretry_delays_ms\t1000,5000\nstrategy\tsticky\n",
			`{"max_attempts":5,"ordered":false,"retry_delays_ms":[1000,5000],"strategy":"sticky"}`},
		{"groups describe mail --settings", "", `{}`},
		{"topics describe orders",
			"name\torders\nid\t1\nstate\tactive\npartitions\t2\ndurability\tquorum\ncreated_epoch\t3\n" +
				"partition\t0\t1\t7\t4\npartition\t1\t0\t0\t0\ngroup\tbilling\tstable\t4\t1\n",
			`{"name":"orders","id":1,"state":"active","partitions":2,"durability":"quorum","created_epoch":3,"produced":9,"bytes":90,` +
				`"partition_stats":[{"partition":0,"first_seq":1,"last_seq":7,"depth":4},{"partition":1,"first_seq":0,"last_seq":0,"depth":0}],` +
				`"groups":[{"group":"billing","state":"stable","lag":4,"members":1}]}`},
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
		{"topics describe other", exitRefused, "topics list"},
		{"groups delete billing --topic orders", exitRefused, "1 connected member"},
		{"dlq list nobody", exitRefused, "groups list"},
		{"dlq show nobody 1", exitRefused, "groups list"},
		{"dlq export nobody", exitRefused, "groups list"},
		{"dlq redrive nobody", exitRefused, "groups list"},
	} {
		r := mortarmq(t, "", strings.Fields(c.args)...)
		r.want(t, c.code, "")
		if !strings.Contains(r.stderr, c.about) {
			t.Errorf("%s: the error does not name %q: %s", c.args, c.about, r.stderr)
		}
	}
}

func TestAdmin_DescribeTellsOfTheGroupAsAWhole(t *testing.T) {
	t.Setenv(envAdmin, startAdmin(t))
	r := mortarmq(t, "", "groups", "describe", "billing", "--topic", "orders")
	for _, part := range []string{"stable", "1 connected member,", "lag 17", "max_attempts 5", "retry_delays_ms 1000,5000, strategy sticky"} {
		if !strings.Contains(r.stderr, part) {
			t.Errorf("no %q in %q", part, r.stderr)
		}
	}
	if r := mortarmq(t, "", "groups", "describe", "mail", "--json"); r.stderr != "" {
		t.Errorf("with JSON it says %q", r.stderr)
	}
}

func TestAdmin_TheFirstNodeThatAnswersIsGoodEnough(t *testing.T) {
	alive := startAdmin(t)
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "still starting", http.StatusServiceUnavailable)
	}))
	defer busy.Close()
	dead := closedPort(t)
	follower := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "node 0 does not lead: ask node 2", http.StatusMisdirectedRequest)
	}))
	defer follower.Close()
	mortarmq(t, "", "leader", "get", "--admin", dead+","+busy.URL+", "+alive).want(t, exitDone, "0\t12\thealthy\n")
	mortarmq(t, "", "groups", "describe", "mail", "--settings", "--admin", follower.URL+","+alive).want(t, exitDone, "")
	r := mortarmq(t, "", "leader", "get", "--admin", dead+","+busy.URL)
	r.want(t, exitUnreachable, "")
	if !strings.Contains(r.stderr, dead) || !strings.Contains(r.stderr, "still starting") {
		t.Errorf("the error does not tell of both nodes: %s", r.stderr)
	}
}

func TestAdmin_ListsAreTheLeadersWhereSomebodyLeads(t *testing.T) {
	node := func(leads bool, topic string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !leads && r.FormValue("leader") == "required" {
				http.Error(w, "ask node 2", http.StatusMisdirectedRequest)
				return
			}
			_, _ = fmt.Fprintf(w, `[{"name":%q}]`, topic)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	follower, leader := node(false, "old"), node(true, "new")
	for nodes, want := range map[string]string{
		follower + "," + leader: "new", leader + "," + follower: "new", follower: "old", follower + "," + node(false, "older"): "old",
	} {
		mortarmq(t, "", "topics", "list", "--admin", nodes).want(t, exitDone, want+"\t0\t\t0\n")
	}
}

func TestAdmin_TheClientPortIsRecognised(t *testing.T) {
	startBroker(t, 1)
	r := mortarmq(t, "", "topics", "list", "--admin", os.Getenv(envServer))
	r.want(t, exitUnreachable, "")
	if !strings.Contains(r.stderr, "client port") {
		t.Errorf("the error is %s", r.stderr)
	}
}

func TestAdmin_APortCanBeLeftOut(t *testing.T) {
	for given, want := range map[string]string{
		"node-1": "node-1:7190", "node-1:8000": "node-1:8000", "http://node-1/": "node-1:7190", "::1": "[::1]:7190",
	} {
		a := app{admin: given}
		if hosts, err := a.adminHosts(); err != nil || len(hosts) != 1 || hosts[0] != want {
			t.Errorf("%s is %v, %v, want %s", given, hosts, err, want)
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
