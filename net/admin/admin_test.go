package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/engine/coord"
)

type fakeSource struct {
	err       error
	leader    int // 3, the node itself, where it is 0
	unhealthy atomic.Bool
}

func (f *fakeSource) Healthy() (bool, string) {
	if f.unhealthy.Load() {
		return false, "shard 0 stopped: fsync: input/output error"
	}
	return true, "leader"
}

func (f *fakeSource) Snapshot(context.Context) (*Snapshot, error) {
	if f.err != nil {
		return nil, f.err
	}
	return &Snapshot{
		NodeID: 3, Version: "v1.2.3", Uptime: 90 * time.Second, IOBackend: "pread", IOReason: "not compiled in",
		LeaderID: cmp.Or(f.leader, 3), Connections: 7,
		Network: []Counter{{Name: "mortarmq_network_bytes_in_total", Help: "Bytes received.", Value: 5}},
		Storage: []Counter{
			{Name: "mortarmq_journal_used_bytes", Help: "Journal in use.", Gauge: true, Value: 11, Shard: "0"},
			{Name: "mortarmq_journal_used_bytes", Help: "Journal in use.", Gauge: true, Value: 12, Shard: "1"},
		},
		Peers: []Counter{{Name: "mortarmq_peer_connected", Help: "Connected.", Gauge: true, Value: 1, Peer: "2", Lane: "log"}},
		Coord: &coord.Stats{
			Epoch: 9, MetadataState: "ok",
			E2E: coord.Quantiles{P50Ms: 1.5, P90Ms: 2, P99Ms: 3.25, Count: 4},
			Topics: []coord.TopicStats{
				{ID: 1, Name: "orders", Partitions: 1, State: "deleting", Produced: 999, Parts: make([]coord.PartitionStats, 1)},
				{ID: 2, Name: "orders", Partitions: 2, State: "active", CreatedEpoch: 8, Durability: "quorum",
					Produced: 10, ProducedBytes: 1000, Delivered: 8, Dropped: 2, DLQ: 1,
					Parts: []coord.PartitionStats{{FirstSeq: 1, LastSeq: 6, Depth: 2}, {FirstSeq: 1, LastSeq: 4}}},
				{ID: 3, Name: "audit", Partitions: 1, State: "active", Parts: []coord.PartitionStats{{}}},
			},
			Groups: []coord.GroupStats{
				{ID: 1, Name: "billing", TopicID: 2, Topic: "orders", State: "stable", Lag: 2, InFlight: 1, Retries: 5,
					Settings: coord.GroupSettings{Strategy: "circle", Retry: "list", RetryDelays: []time.Duration{time.Second, time.Minute},
						MaxAttempts: 3, Lease: 5 * time.Second, Ordered: true, StartLatest: true},
					Members: []coord.MemberStats{{ID: 77, Connected: true, AssignmentEpoch: 4, InstalledEpoch: 3, OwnershipEpoch: 6, Lag: 2}},
					Parts:   []coord.GroupPartitionStats{{Member: 77, OwnershipEpoch: 6, Installed: true, AckFloor: 4, Lag: 2}, {}}},
				{ID: 2, Name: "audit", TopicID: 3, Topic: "audit", State: "empty"},
				{ID: 3, Name: "twice", TopicID: 2, Topic: "orders", State: "empty"},
				{ID: 4, Name: "twice", TopicID: 3, Topic: "audit", State: "empty"},
			},
		},
	}, nil
}

func start(t *testing.T, f *fakeSource, metrics bool) *Server {
	t.Helper()
	s := New(Options{Addr: "127.0.0.1:0", Source: f, Metrics: metrics, Logger: slog.New(slog.DiscardHandler)})
	if err := s.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Shutdown(context.Background()); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
	})
	return s
}

func get(t *testing.T, s *Server, path string) (int, string) {
	t.Helper()
	resp, err := http.Get("http://" + s.Addr().String() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestMetrics_FixedNamesTypesAndLabels(t *testing.T) {
	s := start(t, new(fakeSource), true)
	status, body := get(t, s, "/metrics")
	if status != http.StatusOK {
		t.Fatalf("status %d: %s", status, body)
	}
	for _, line := range []string{
		"# TYPE mortarmq_broker_uptime_seconds gauge", "mortarmq_broker_uptime_seconds 90",
		"# TYPE mortarmq_connections gauge", "mortarmq_connections 7",
		"# TYPE mortarmq_leader_epoch gauge", "mortarmq_leader_epoch 9",
		"# TYPE mortarmq_quorum_state gauge", "mortarmq_quorum_state 0",
		"# TYPE mortarmq_topic_messages_produced_total counter", `mortarmq_topic_messages_produced_total{topic="orders"} 10`,
		"# TYPE mortarmq_topic_messages_delivered_total counter", `mortarmq_topic_messages_delivered_total{topic="orders"} 8`,
		"# TYPE mortarmq_topic_messages_dropped_total counter", `mortarmq_topic_messages_dropped_total{topic="orders"} 2`,
		"# TYPE mortarmq_topic_messages_dlq_total counter", `mortarmq_topic_messages_dlq_total{topic="orders"} 1`,
		"# TYPE mortarmq_topic_bytes_total counter", `mortarmq_topic_bytes_total{topic="orders"} 1000`,
		"# TYPE mortarmq_partition_depth gauge", `mortarmq_partition_depth{partition="0",topic="orders"} 2`,
		"# TYPE mortarmq_partition_last_seq gauge", `mortarmq_partition_last_seq{partition="1",topic="orders"} 4`,
		"# TYPE mortarmq_group_lag gauge", `mortarmq_group_lag{group="billing",topic="orders"} 2`,
		"# TYPE mortarmq_group_in_flight gauge", `mortarmq_group_in_flight{group="billing",topic="orders"} 1`,
		"# TYPE mortarmq_group_retries_total counter", `mortarmq_group_retries_total{group="billing",topic="orders"} 5`,
		"# TYPE mortarmq_e2e_latency_ms gauge", `mortarmq_e2e_latency_ms{quantile="p50"} 1.5`,
		`mortarmq_e2e_latency_ms{quantile="p90"} 2`, `mortarmq_e2e_latency_ms{quantile="p99"} 3.25`,
		"# TYPE mortarmq_network_bytes_in_total counter", "mortarmq_network_bytes_in_total 5",
		"# TYPE mortarmq_journal_used_bytes gauge", `mortarmq_journal_used_bytes{shard="1"} 12`,
		"# TYPE mortarmq_peer_connected gauge", `mortarmq_peer_connected{lane="log",peer="2"} 1`,
		"# TYPE go_goroutines gauge", "# TYPE process_cpu_seconds_total counter",
	} {
		if !strings.Contains(body, line+"\n") {
			t.Errorf("missing: %s", line)
		}
	}
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "mortarmq_topic_") && strings.Contains(line, "999") {
			t.Errorf("a topic that is being deleted hides its successor of the same name: %s", line)
		}
	}
}

func TestMetrics_RuntimeStaysReadableWhenTheBrokerDoesNotAnswer(t *testing.T) {
	f := &fakeSource{err: errors.New("coordinator stopped")}
	s := start(t, f, true)
	status, body := get(t, s, "/metrics")
	if status != http.StatusOK || !strings.Contains(body, "go_goroutines") {
		t.Errorf("status %d: %s", status, body)
	}
}

func TestMetrics_CanBeSwitchedOff(t *testing.T) {
	s := start(t, new(fakeSource), false)
	if status, _ := get(t, s, "/metrics"); status != http.StatusNotFound {
		t.Errorf("status %d", status)
	}
}

func TestHealthz_TellsTheState(t *testing.T) {
	f := new(fakeSource)
	s := start(t, f, true)
	status, body := get(t, s, "/healthz")
	if status != http.StatusOK || !strings.Contains(body, `"leader"`) {
		t.Errorf("%d %s", status, body)
	}
	f.unhealthy.Store(true)
	status, body = get(t, s, "/healthz")
	if status != http.StatusServiceUnavailable || !strings.Contains(body, "input/output error") {
		t.Errorf("%d %s", status, body)
	}
}

func TestStats_NeedsAFilter(t *testing.T) {
	s := start(t, new(fakeSource), true)
	for path, want := range map[string]struct {
		status int
		parts  []string
	}{
		"/stats":                           {400, []string{"filter is required"}},
		"/stats?topic=&group=":             {400, []string{"filter is required"}},
		"/stats?topic=nowhere":             {404, []string{"no topic"}},
		"/stats?group=nobody":              {404, []string{"no group"}},
		"/stats?topic=orders":              {200, []string{`"produced": 10`, `"depth": 2`, `"billing"`, `"ack_floor": 4`}},
		"/stats?group=billing":             {200, []string{`"topics": []`, `"member": 77`, `"strategy": "circle"`, `"start": "latest"`, `"lease_ms": 5000`, `"max_attempts": 3`, `"ordered": true`, `"retry": "list"`, `60000`}},
		"/stats?topic=orders&group=nobody": {200, []string{`"groups": []`}},
	} {
		status, body := get(t, s, path)
		if status != want.status {
			t.Errorf("%s: status %d: %s", path, status, body)
		}
		for _, part := range want.parts {
			if !strings.Contains(body, part) {
				t.Errorf("%s lacks %s:\n%s", path, part, body)
			}
		}
	}
}

func TestAPI_AnswersWhatTheCommandLineReads(t *testing.T) {
	s := start(t, new(fakeSource), true)
	var status Broker
	var leader Leader
	var topics []Topic
	var groups []Group
	var members []Member
	for path, v := range map[string]any{
		"/broker": &status, "/leader": &leader, "/topics": &topics,
		"/groups?topic=orders": &groups, "/groups/billing": &members,
	} {
		code, body := get(t, s, path)
		if code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, body)
		}
		if err := json.Unmarshal([]byte(body), v); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if status.NodeID != 3 || status.UptimeSeconds != 90 || status.Connections != 7 || status.Version != "v1.2.3" || status.IOBackend != "pread" {
		t.Errorf("status %+v", status)
	}
	if leader != (Leader{3, 9, "healthy"}) {
		t.Errorf("leader %+v", leader)
	}
	if len(topics) != 3 || topics[0].Name != "audit" || topics[2].Partitions != 2 || topics[2].CreatedEpoch != 8 {
		t.Errorf("topics %+v", topics)
	}
	if len(groups) != 2 || groups[0].Group != "billing" || groups[0].Members != nil {
		t.Errorf("groups %+v", groups)
	}
	if len(members) != 1 || members[0] != (Member{77, 4, 6, 2, 3, true}) {
		t.Errorf("members %+v", members)
	}
	if _, body := get(t, s, "/groups/audit?topic=audit"); strings.TrimSpace(body) != "[]" {
		t.Errorf("a group without members: %s", body)
	}
}

func TestAPI_RefusesWhatItCannotAnswer(t *testing.T) {
	f := new(fakeSource)
	s := start(t, f, true)
	for path, want := range map[string]int{
		"/groups/nobody": 404, "/groups/billing?topic=audit": 404, "/groups/twice": 409, "/nothing": 404, "/debug/pprof/": 200, "/debug/pprof/goroutine?debug=1": 200,
	} {
		if status, body := get(t, s, path); status != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	resp, err := http.Post("http://"+s.Addr().String()+"/topics", "text/plain", nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", resp.StatusCode)
	}
	f.err = context.DeadlineExceeded
	if status, _ := get(t, s, "/topics"); status != http.StatusServiceUnavailable {
		t.Errorf("a silent broker: %d", status)
	}
}

func TestServer_ReportsAddressInUse(t *testing.T) {
	s := start(t, new(fakeSource), true)
	other := New(Options{Addr: s.Addr().String(), Source: new(fakeSource)})
	if err := other.Start(context.Background()); err == nil || !strings.Contains(err.Error(), "admin port") {
		t.Errorf("Start: %v", err)
	}
}
