package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

func env(pairs ...string) []string {
	environ := []string{"HOME=/root", "MORTAR_SERVER=localhost:7188"}
	for i := 0; i < len(pairs); i += 2 {
		environ = append(environ, pairs[i]+"="+pairs[i+1])
	}
	return environ
}

func configFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mortard.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

func TestDefault_IsTheSpecification(t *testing.T) {
	c := Default()
	for key, want := range map[string]any{
		"node_id": 0, "peers": []Peer(nil), "leader_priority": []int(nil), "listen_client": "0.0.0.0:7188",
		"listen_peer": "0.0.0.0:7189", "data_dir": "./data", "segment_max_bytes": int64(67108864),
		"partition_default_count": 4, "delivery_max_attempts": 5, "delivery_lease_ms": int64(30000),
		"poll_max_wait_ms": int64(5000), "credit_initial_count": 256, "metadata_snapshot_records": 8192,
		"metrics_enabled": true, "log_level": "info", "listen_ws": "off", "listen_admin": "127.0.0.1:7190",
		"ws_origins": []string{"http://localhost", "http://127.0.0.1", "http://[::1]"},
	} {
		found := false
		for i := range settings {
			if settings[i].key == key {
				found = true
				if got := reflect.ValueOf(settings[i].field(&c)).Elem().Interface(); !reflect.DeepEqual(got, want) {
					t.Errorf("%s is %v, not %v", key, got, want)
				}
			}
		}
		if !found {
			t.Errorf("%s is no key", key)
		}
	}
}

func TestSettings_EveryFieldHasExactlyOneKey(t *testing.T) {
	var c Config
	seen := map[any]string{}
	for i := range settings {
		p := settings[i].field(&c)
		if other, ok := seen[p]; ok {
			t.Errorf("%s and %s set the same field", settings[i].key, other)
		}
		seen[p] = settings[i].key
	}
	if n := reflect.TypeOf(c).NumField(); n != len(settings) {
		t.Errorf("%d fields, %d keys", n, len(settings))
	}
}

func TestParse_FlagsOverrideVariablesOverrideTheFile(t *testing.T) {
	path := configFile(t, `{
		"_comment": {"anything": ["at", "all"]},
		"listen_client": "127.0.0.1:1", "listen_admin": "127.0.0.1:2", "data_dir": "/file",
		"delivery_max_attempts": 7, "metrics_enabled": false, "ws_origins": [], "auth_token_digests": ["`+digest+`"]
	}`)
	inv, err := parse(
		[]string{"--config", path, "--data-dir=/flag", "--metrics-enabled", "--delivery-lease-ms", "1000"},
		env("MORTAR_DATA_DIR", "/variable", "MORTAR_LISTEN_ADMIN", "127.0.0.1:3", "MORTAR_SERVER", "not ours"),
		os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	c := inv.config
	if c.DataDir != "/flag" || c.ListenAdmin != "127.0.0.1:3" || c.ListenClient != "127.0.0.1:1" ||
		c.DeliveryMaxAttempts != 7 || !c.MetricsEnabled || c.DeliveryLeaseMs != 1000 || len(c.WSOrigins) != 0 ||
		len(c.AuthTokenDigests) != 1 || c.PartitionDefaultCount != 4 {
		t.Errorf("%+v", c)
	}
}

func TestParse_ConfigFileFromTheEnvironment(t *testing.T) {
	path := configFile(t, `{"listen_client": "127.0.0.1:1"}`)
	inv, err := parse(nil, env("MORTAR_CONFIG", path), os.Stderr)
	if err != nil || inv.config.ListenClient != "127.0.0.1:1" {
		t.Errorf("%v", err)
	}
}

func TestParse_ReportsEveryProblemOfTheFileAtOnce(t *testing.T) {
	path := configFile(t, `{
		"listen_https": "0.0.0.0:443",
		"NODE_ID": 1,
		"delivery_max_attempts": "five",
		"credit_initial_count": 1.5,
		"metrics_enabled": null,
		"shards": 65,
		"log_level": "loud",
		"zzzzzzzzzzzzzzzzzzzz": 1,
		"peers": [{"node_id": 0, "address": "x"}],
		"data_dir": "/a",
		"data_dir": "/b"
	}`)
	_, err := parse([]string{"--config", path, "--event-loops", "0", "--poll-max-wait-ms", "soon"}, env(), os.Stderr)
	var usage *usageError
	if !errors.As(err, &usage) {
		t.Fatalf("error %v", err)
	}
	for _, part := range []string{
		"unknown key: listen_https (did you mean listen_", "unknown key: NODE_ID (did you mean node_id?)",
		`delivery_max_attempts is "five": use a whole number`, "credit_initial_count is 1.5", "metrics_enabled is null",
		"unknown key: zzzzzzzzzzzzzzzzzzzz (the keys are node_id,", "peers is [", "data_dir is there twice", path,
		"shards is 65", "log_level is \"loud\"", "event_loops is 0", "--poll-max-wait-ms",
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing in:\n%v", part, err)
		}
	}
}

func TestParse_BrokenFiles(t *testing.T) {
	for text, part := range map[string]string{
		"":                                    "one JSON object",
		"[]":                                  "one JSON object",
		"{\n\n\"node_id\": 1,,":               "line 3",
		`{"node_id": 1`:                       "ends too early",
		`{"listen_client": "127.0.0.1:1"} x`:  "something follows",
		`{"listen_client": "127.0.0.1:1"} {}`: "something follows",
	} {
		_, err := parse([]string{"--config", configFile(t, text)}, env(), os.Stderr)
		if err == nil || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), "auth_token_digests") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := parse([]string{"--config", "/does/not/exist"}, env(), os.Stderr); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

func TestParse_Flags(t *testing.T) {
	for _, c := range []struct{ args, part string }{
		{"--listen-cleint x", "unknown flag: --listen-cleint (did you mean --listen-client?)"},
		{"--shards many", `--shards: shards is "many": use a whole number`},
		{"--metrics-enabled=perhaps", "use true or false"},
		{"--leader-priority 1,x", "use a list of numbers"},
		{"serve", "unexpected argument"},
		{"--config", "flag needs an argument"},
	} {
		_, err := parse(strings.Fields(c.args), env(), os.Stderr)
		if err == nil || !strings.Contains(err.Error(), c.part) {
			t.Errorf("%s: %v", c.args, err)
		}
	}
	var out bytes.Buffer
	if _, err := parse([]string{"--help"}, env(), &out); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("--help: %v", err)
	}
	for i := range settings {
		if !strings.Contains(out.String(), "--"+settings[i].flag()+"\n") {
			t.Errorf("--help does not name --%s", settings[i].flag())
		}
	}
	if _, err := parse(nil, env("MORTAR_SHARDS", "x"), os.Stderr); err == nil || !strings.Contains(err.Error(), "MORTAR_SHARDS") {
		t.Errorf("a bad variable: %v", err)
	}
}

func TestParse_OpenToTheNetworkOnlyWithTokens(t *testing.T) {
	empty := configFile(t, `{}`)
	withToken := configFile(t, `{"auth_token_digests": ["`+digest+`"]}`)
	for _, c := range []struct {
		name string
		args []string
		want string // listen_client, or "" for a refusal
	}{
		{"nothing given", nil, "127.0.0.1:7188"},
		{"only a data directory", []string{"--data-dir", "/x"}, "127.0.0.1:7188"},
		{"tokens without a file", []string{"--auth-token-digests", digest}, "0.0.0.0:7188"},
		{"a file without tokens", []string{"--config", empty}, ""},
		{"a file with tokens", []string{"--config", withToken}, "0.0.0.0:7188"},
		{"a file without tokens on loopback", []string{"--config", empty, "--listen-client", "127.0.0.1:9"}, "127.0.0.1:9"},
		{"IPv6 loopback", []string{"--listen-client", "[::1]:9"}, "[::1]:9"},
		{"localhost", []string{"--listen-client", "localhost:9"}, "localhost:9"},
		{"all addresses by flag", []string{"--listen-client", ":7188"}, ""},
		{"all IPv6 addresses by flag", []string{"--listen-client", "[::]:7188"}, ""},
		{"a name by flag", []string{"--listen-client", "broker.example:7188"}, ""},
	} {
		inv, err := parse(c.args, env(), os.Stderr)
		switch {
		case c.want == "" && (err == nil || !strings.Contains(err.Error(), "auth_token_digests is empty")):
			t.Errorf("%s: not refused: %v", c.name, err)
		case c.want != "" && (err != nil || inv.config.ListenClient != c.want):
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestValidate_ReportsEveryProblemAtOnce(t *testing.T) {
	c := Default()
	c.NodeID = -1
	c.ListenClient = "nowhere"
	c.ListenPeer = "1.2.3.4:port"
	c.ListenAdmin = "x:99999"
	c.LogLevel = "loud"
	c.DeliveryMaxAttempts = 0
	c.DeliveryLeaseMs = 1 << 62
	c.PollMaxWaitMs = 65536
	c.CreditInitialCount = 0
	c.PartitionDefaultCount = 0
	c.SegmentMaxBytes = 5 << 30
	c.MetadataSnapshotRecords = 0
	c.AuthTokenDigests = []string{digest, "secret"}
	c.IOBackend = "carrier pigeon"
	c.EventLoops = 0
	c.Peers = []Peer{{}}
	c.LeaderPriority = []int{1}
	c.PeerSecretFile = "/secret"
	c.ListenWS = "0.0.0.0:80"
	err := c.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, key := range []string{
		"node_id", "listen_client", "listen_peer", "listen_admin", "log_level", "delivery_max_attempts",
		"delivery_lease_ms", "poll_max_wait_ms", "credit_initial_count", "partition_default_count", "segment_max_bytes",
		"metadata_snapshot_records", "auth_token_digests[1]", "io_backend", "event_loops",
		"peers names 1 nodes", "peers[0].addr", "leader_priority", "peer_secret_file", "listen_ws",
	} {
		if !strings.Contains(err.Error(), key) {
			t.Errorf("%s is missing in:\n%v", key, err)
		}
	}
	if strings.Contains(err.Error(), `"secret"`) {
		t.Error("the message repeats what may be a token")
	}
}

func TestLockDir_SecondBrokerIsToldWhoHoldsIt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	first, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = lockDir(dir)
	if err == nil || !strings.Contains(err.Error(), "in use by process "+strconv.Itoa(os.Getpid())) {
		t.Errorf("second lock: %v", err)
	}
	if err := first.unlock(); err != nil {
		t.Fatal(err)
	}
	again, err := lockDir(dir)
	if err != nil {
		t.Fatalf("after the first has gone: %v", err)
	}
	_ = again.unlock()
	if _, err := lockDir("/proc/nowhere"); err == nil || !strings.Contains(err.Error(), "data_dir") {
		t.Errorf("an impossible directory: %v", err)
	}
}

func TestParse_VariablesThatNothingReads(t *testing.T) {
	for _, c := range []struct{ name, suggestion string }{
		{"MORTAR_DATADIR", "MORTAR_DATA_DIR"},
		{"MORTAR_LISTEN_CLIENTS", "MORTAR_LISTEN_CLIENT"},
		{"MORTAR_LOGLEVEL", "MORTAR_LOG_LEVEL"},
		{"MORTAR_data_dir", "MORTAR_DATA_DIR"},
	} {
		_, err := parse(nil, env(c.name, "x"), os.Stderr)
		if err == nil || !strings.Contains(err.Error(), c.name) || !strings.Contains(err.Error(), c.suggestion+"?") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	service := []string{"MORTAR_SERVICE_HOST", "MORTAR_SERVICE_PORT", "MORTAR_SERVICE_PORT_CLIENT", "MORTAR_SERVICE_PORT_ADMIN", "MORTAR_PORT",
		"MORTAR_PORT_7188_TCP", "MORTAR_PORT_7188_TCP_PROTO", "MORTAR_PORT_7188_TCP_PORT", "MORTAR_PORT_7188_TCP_ADDR"}
	pairs := []string{"MORTARMQ_X", "not ours"}
	for _, name := range service {
		pairs = append(pairs, name, "x")
	}
	inv, err := parse(nil, env(pairs...), os.Stderr)
	if err != nil {
		t.Fatalf("a service of Kubernetes: %v", err)
	}
	if len(inv.warnings) != len(service) || !strings.Contains(inv.warnings[0], service[0]) {
		t.Errorf("warnings %q", inv.warnings)
	}
}
