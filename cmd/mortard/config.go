package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/engine/replica"
	"github.com/mortarmq/mortarmq/net/peer"
)

// Config holds every key of the configuration, in the units that the keys' names end with. It does not change after
// the start.
type Config struct {
	NodeID         int
	Peers          []Peer
	LeaderPriority []int
	ListenClient   string
	ListenPeer     string
	ListenAdmin    string
	ListenWS       string
	WSOrigins      []string
	DataDir        string

	SegmentMaxBytes         int64
	PartitionDefaultCount   int
	DeliveryMaxAttempts     int
	DeliveryLeaseMs         int64
	PollMaxWaitMs           int64
	CreditInitialCount      int
	MetadataSnapshotRecords int
	MetricsEnabled          bool
	LogLevel                string

	AuthTokenDigests []string
	PeerSecretFile   string

	LeaseHeartbeatMs     int64
	LeaseMs              int64
	QuorumTimeoutMs      int64
	FollowerSoftGapMs    int64
	FollowerSoftGapBytes int64
	FollowerHardGapMs    int64

	Shards           int
	IOBackend        string
	EventLoops       int
	JournalFileBytes int64
	JournalMaxFiles  int
	// ScrubBytesPerSecond is how fast each shard reads its full segments in the background; 0: not at all.
	ScrubBytesPerSecond int64
	MemoryBytes         int64
}

// Peer is an element of peers.
type Peer struct {
	NodeID     int    `json:"node_id"`
	Addr       string `json:"addr"`
	ClientAddr string `json:"client_addr"`
}

// off switches a listener off.
const off = "off"

// Default returns the defaults of the specification.
func Default() Config {
	e := engine.DefaultOptions("./data")
	return Config{
		ListenClient:            "0.0.0.0:7188",
		ListenPeer:              "0.0.0.0:7189",
		ListenAdmin:             "127.0.0.1:7190",
		ListenWS:                off,
		WSOrigins:               []string{"http://localhost", "http://127.0.0.1", "http://[::1]"},
		DataDir:                 e.DataDir,
		SegmentMaxBytes:         e.SegmentMaxBytes,
		PartitionDefaultCount:   e.PartitionDefaultCount,
		DeliveryMaxAttempts:     e.DeliveryMaxAttempts,
		DeliveryLeaseMs:         e.DeliveryLease.Milliseconds(),
		PollMaxWaitMs:           e.PollMaxWait.Milliseconds(),
		CreditInitialCount:      e.CreditInitialCount,
		MetadataSnapshotRecords: e.MetadataSnapshotRecords,
		MetricsEnabled:          true,
		LogLevel:                "info",
		LeaseHeartbeatMs:        replica.DefaultHeartbeat.Milliseconds(),
		LeaseMs:                 replica.DefaultLease.Milliseconds(),
		QuorumTimeoutMs:         replica.DefaultQuorumTimeout.Milliseconds(),
		FollowerSoftGapMs:       replica.DefaultSoftGap.Milliseconds(),
		FollowerSoftGapBytes:    replica.DefaultSoftGapBytes,
		FollowerHardGapMs:       replica.DefaultHardGap.Milliseconds(),
		IOBackend:               e.IOBackend,
		EventLoops:              1,
		JournalFileBytes:        e.JournalFileBytes,
		JournalMaxFiles:         e.JournalMaxFiles,
		ScrubBytesPerSecond:     e.ScrubBytes,
		MemoryBytes:             e.MemoryBytes,
	}
}

// setting is one key: in the file as it is, as a flag with dashes, as a variable MORTAR_ in capitals.
type setting struct {
	key, help string
	field     func(*Config) any // pointer to the field
}

// settings lists every key. The first 18 are the specification's. Of the others, auth_token_digests and peer_secret_file
// are there from the start; the lease_, quorum_ and follower_ keys are for networks and disks that are slower or quicker
// than those that the defaults were chosen for; shards must be chosen before there is data; io_backend rules io_uring out where it misbehaves;
// event_loops is for machines with more than two cores; the last three trade memory and disk space for longer bursts, and
// keep tests small.
var settings = []setting{
	{"node_id", "this node's number among the peers, 0 to 65535", func(c *Config) any { return &c.NodeID }},
	{"peers", "all nodes of the cluster, this one too; none = single node", func(c *Config) any { return &c.Peers }},
	{"leader_priority", "node ids, the preferred leader first", func(c *Config) any { return &c.LeaderPriority }},
	{"listen_client", "host:port for clients", func(c *Config) any { return &c.ListenClient }},
	{"listen_peer", "host:port for the other nodes", func(c *Config) any { return &c.ListenPeer }},
	{"data_dir", "directory of everything that is stored", func(c *Config) any { return &c.DataDir }},
	{"segment_max_bytes", "size from which a partition begins its next file", func(c *Config) any { return &c.SegmentMaxBytes }},
	{"partition_default_count", "partitions of a topic whose creator names no number", func(c *Config) any { return &c.PartitionDefaultCount }},
	{"delivery_max_attempts", "failed deliveries until a message goes to the dead-letter topic", func(c *Config) any { return &c.DeliveryMaxAttempts }},
	{"delivery_lease_ms", "time to acknowledge a message before it is delivered again", func(c *Config) any { return &c.DeliveryLeaseMs }},
	{"poll_max_wait_ms", "longest wait of a PULL", func(c *Config) any { return &c.PollMaxWaitMs }},
	{"credit_initial_count", "messages that a consumer may have open at first", func(c *Config) any { return &c.CreditInitialCount }},
	{"metadata_snapshot_records", "metadata changes between two snapshots", func(c *Config) any { return &c.MetadataSnapshotRecords }},
	{"metrics_enabled", "serve /metrics on the admin port", func(c *Config) any { return &c.MetricsEnabled }},
	{"log_level", "debug, info, warn or error", func(c *Config) any { return &c.LogLevel }},
	{"listen_ws", "host:port for WebSocket clients, or off", func(c *Config) any { return &c.ListenWS }},
	{"listen_admin", "host:port for health, metrics and profiles, or off", func(c *Config) any { return &c.ListenAdmin }},
	{"ws_origins", "origins that may open a WebSocket; empty = nobody", func(c *Config) any { return &c.WSOrigins }},

	{"auth_token_digests", "SHA-256 of each token that clients may use, in hex (mortarmq hash-token); none = any token, on loopback only", func(c *Config) any { return &c.AuthTokenDigests }},
	{"peer_secret_file", "file with the secret that the nodes share", func(c *Config) any { return &c.PeerSecretFile }},
	{"lease_heartbeat_ms", "time between two renewals of the leader's lease", func(c *Config) any { return &c.LeaseHeartbeatMs }},
	{"lease_ms", "time without a renewal after which another node may lead", func(c *Config) any { return &c.LeaseMs }},
	{"quorum_timeout_ms", "time that a publish may wait for a majority until the cluster is read-only", func(c *Config) any { return &c.QuorumTimeoutMs }},
	{"follower_soft_gap_ms", "time that a follower may be behind without a warning", func(c *Config) any { return &c.FollowerSoftGapMs }},
	{"follower_soft_gap_bytes", "bytes that a follower may be behind without a warning", func(c *Config) any { return &c.FollowerSoftGapBytes }},
	{"follower_hard_gap_ms", "time without any follower after which writes are told so", func(c *Config) any { return &c.FollowerHardGapMs }},
	{"shards", "number of journals, fixed when the data directory is created; 0 = default", func(c *Config) any { return &c.Shards }},
	{"io_backend", "auto, uring or pread", func(c *Config) any { return &c.IOBackend }},
	{"event_loops", "event loops of the client port", func(c *Config) any { return &c.EventLoops }},
	{"journal_file_bytes", "size of a journal file", func(c *Config) any { return &c.JournalFileBytes }},
	{"journal_max_files", "journal files per shard at most", func(c *Config) any { return &c.JournalMaxFiles }},
	{"scrub_bytes_per_second", "how fast stored segments are read in the background to find damage, 0: not at all", func(c *Config) any { return &c.ScrubBytesPerSecond }},
	{"memory_bytes", "off-heap memory per shard at most", func(c *Config) any { return &c.MemoryBytes }},
}

// commentKey may stand in the file and says nothing.
const commentKey = "_comment"

func (s *setting) flag() string     { return strings.ReplaceAll(s.key, "_", "-") }
func (s *setting) variable() string { return variablePrefix + strings.ToUpper(s.key) }

// parseFile reads a configuration file over c. It reports every problem at once.
func (c *Config) parseFile(text []byte) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return &brokenFile{errors.Join(errors.New("the file must hold one JSON object"), ignoreEOF(err))}
	}
	var errs []error
	seen := make(map[string]bool)
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return syntaxError(text, err)
		}
		key := t.(string) // the decoder allows nothing else here
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return syntaxError(text, err)
		}
		if key == commentKey {
			continue
		}
		if seen[key] {
			errs = append(errs, fmt.Errorf("%s is there twice: keep one", key))
		}
		seen[key] = true
		if i := slices.IndexFunc(settings, func(s setting) bool { return s.key == key }); i < 0 {
			errs = append(errs, unknownKey(key))
		} else if err := settings[i].setJSON(c, raw); err != nil {
			errs = append(errs, err)
		}
	}
	if _, err := dec.Token(); err != nil {
		return syntaxError(text, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		errs = append(errs, errors.New("something follows the JSON object: remove it"))
	}
	return errors.Join(errs...)
}

func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// brokenFile is the error of a file of which not every key is known, because it isn't JSON.
type brokenFile struct{ err error }

func (e *brokenFile) Error() string { return e.err.Error() }
func (e *brokenFile) Unwrap() error { return e.err }

// syntaxError adds the line to an error of the JSON decoder.
func syntaxError(text []byte, err error) error {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		end := min(int(syntax.Offset), len(text))
		return &brokenFile{fmt.Errorf("line %d: not valid JSON: %w", 1+bytes.Count(text[:end], []byte("\n")), err)}
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &brokenFile{errors.New("not valid JSON: the file ends too early")}
	}
	return &brokenFile{fmt.Errorf("not valid JSON: %w", err)}
}

func unknownKey(key string) error {
	keys := settingKeys()
	if near := nearest(key, keys); near != "" {
		return fmt.Errorf("unknown key: %s (did you mean %s?)", key, near)
	}
	return fmt.Errorf("unknown key: %s (the keys are %s)", key, strings.Join(keys, ", "))
}

// setJSON sets the field from the value in a file.
func (s *setting) setJSON(c *Config, raw json.RawMessage) error {
	if string(raw) == "null" {
		return fmt.Errorf("%s is null: leave it out to get the default", s.key)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(s.field(c)); err != nil {
		return fmt.Errorf("%s is %s: %s", s.key, shorten(string(raw)), s.wants(c))
	}
	return nil
}

// set sets the field from a flag or a variable.
func (s *setting) set(c *Config, text string) error {
	wrong := func() error { return fmt.Errorf("%s is %q: %s", s.key, shorten(text), s.wants(c)) }
	switch f := s.field(c).(type) {
	case *string:
		*f = text
	case *bool:
		v, err := strconv.ParseBool(text)
		if err != nil {
			return wrong()
		}
		*f = v
	case *int:
		v, err := strconv.Atoi(text)
		if err != nil {
			return wrong()
		}
		*f = v
	case *int64:
		v, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return wrong()
		}
		*f = v
	case *[]string:
		*f = splitList(text)
	case *[]int:
		list := []int{}
		for _, part := range splitList(text) {
			v, err := strconv.Atoi(part)
			if err != nil {
				return wrong()
			}
			list = append(list, v)
		}
		*f = list
	case *[]Peer:
		return s.setJSON(c, json.RawMessage(text))
	default:
		panic(fmt.Sprintf("mortard: %s has a field of type %T", s.key, f))
	}
	return nil
}

func splitList(text string) []string {
	list := []string{}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, part)
		}
	}
	return list
}

// wants says what a value must look like.
func (s *setting) wants(c *Config) string {
	switch s.field(c).(type) {
	case *bool:
		return "use true or false"
	case *int, *int64:
		return "use a whole number"
	case *[]string:
		return `use a list of strings, such as ["a", "b"]`
	case *[]int:
		return "use a list of numbers, such as [0, 1, 2]"
	case *[]Peer:
		return `use a list of {"node_id": 0, "addr": "host:7189", "client_addr": "host:7188"}`
	default:
		return "use a string"
	}
}

func shorten(text string) string {
	const most = 60
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// Validate reports every problem of the configuration at once.
func (c *Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.NodeID >= 0 && c.NodeID <= 65535, "node_id is %d: use 0 to 65535", c.NodeID)
	for _, l := range []struct{ key, addr string }{
		{"listen_client", c.ListenClient}, {"listen_peer", c.ListenPeer}, {"listen_admin", c.ListenAdmin},
	} {
		if l.key == "listen_admin" && l.addr == off {
			continue
		}
		if err := checkAddr(l.addr); err != nil {
			errs = append(errs, fmt.Errorf("%s is %q: %w", l.key, l.addr, err))
		}
	}
	_, err := parseLevel(c.LogLevel)
	check(err == nil, "log_level is %q: use debug, info, warn or error", c.LogLevel)
	check(c.DeliveryMaxAttempts <= 65535, "delivery_max_attempts is %d: use at most 65535", c.DeliveryMaxAttempts)
	check(c.DeliveryLeaseMs <= maxLeaseMs, "delivery_lease_ms is %d: use at most %d (a week)", c.DeliveryLeaseMs, maxLeaseMs)
	check(c.PollMaxWaitMs <= 65535, "poll_max_wait_ms is %d: use at most 65535", c.PollMaxWaitMs)
	check(c.EventLoops >= 1 && c.EventLoops <= 256, "event_loops is %d: use 1 to 256", c.EventLoops)
	if _, err := c.digests(); err != nil {
		errs = append(errs, err)
	}
	check(len(c.AuthTokenDigests) > 0 || isLoopback(c.ListenClient) || checkAddr(c.ListenClient) != nil,
		"listen_client is %q, which others can reach, and auth_token_digests is empty, so anybody could use the broker: "+
			"add a digest (mortarmq hash-token prints it) or listen on 127.0.0.1", c.ListenClient)
	errs = append(errs, c.checkCluster()...)
	options := c.engineOptions(nil)
	if err := options.Validate(); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, c.unsupported()...)
	return errors.Join(errs...)
}

const maxLeaseMs = 7 * 24 * 3600 * 1000

// unsupported lists what this version understands but cannot do.
func (c *Config) unsupported() []error {
	var errs []error
	if c.ListenWS != off && c.ListenWS != "" {
		errs = append(errs, fmt.Errorf("listen_ws is %q, but this version does not serve WebSocket: set it to off", c.ListenWS))
	}
	return errs
}

// digests decodes auth_token_digests.
func (c *Config) digests() ([][sha256.Size]byte, error) {
	var list [][sha256.Size]byte
	var errs []error
	for i, text := range c.AuthTokenDigests {
		var d [sha256.Size]byte
		if n, err := hex.Decode(d[:], []byte(text[:min(len(text), 2*len(d))])); err != nil || n != len(d) || len(text) != 2*len(d) {
			// The text may be a token that was put there by mistake, so it is not repeated.
			errs = append(errs, fmt.Errorf("auth_token_digests[%d] is not a SHA-256 in hex (64 digits): mortarmq hash-token prints it", i))
			continue
		}
		list = append(list, d)
	}
	return list, errors.Join(errs...)
}

// engineOptions is the engine's part.
func (c *Config) engineOptions(log *slog.Logger) engine.Options {
	o := engine.DefaultOptions(c.DataDir)
	o.Shards = c.Shards
	o.SegmentMaxBytes = c.SegmentMaxBytes
	o.JournalFileBytes = c.JournalFileBytes
	o.JournalMaxFiles = c.JournalMaxFiles
	o.ScrubBytes = c.ScrubBytesPerSecond
	o.MemoryBytes = c.MemoryBytes
	o.TailBytes = min(o.TailBytes, c.MemoryBytes/4)
	o.MaxOpenFiles = fileShare()
	o.PartitionDefaultCount = c.PartitionDefaultCount
	o.DeliveryMaxAttempts = c.DeliveryMaxAttempts
	o.DeliveryLease = time.Duration(min(c.DeliveryLeaseMs, maxLeaseMs)) * time.Millisecond
	o.PollMaxWait = time.Duration(min(c.PollMaxWaitMs, maxLeaseMs)) * time.Millisecond
	o.CreditInitialCount = c.CreditInitialCount
	o.MetadataSnapshotRecords = c.MetadataSnapshotRecords
	o.IOBackend = c.IOBackend
	o.Logger = log
	return o
}

func checkAddr(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return errors.New("use host:port, such as 127.0.0.1:7188")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("the port %q is not a number from 0 to 65535", port)
	}
	return nil
}

// isLoopback reports whether only this machine can reach addr. Names other than localhost are not resolved.
func isLoopback(addr string) bool { return peer.Loopback(addr) }

func parseLevel(text string) (slog.Level, error) {
	switch text {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	default:
		return 0, fmt.Errorf("unknown level %q", text)
	}
}

// nearest returns the candidate that is most like word, "" if none is much like it.
func nearest(word string, candidates []string) string {
	best, bestDistance := "", max(2, len(word)/2)+1
	for _, c := range candidates {
		if d := distance(strings.ToLower(word), c); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	return best
}

// distance is Levenshtein's: the number of bytes to insert, delete or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
