package cli

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// consume joins a group; the test's end leaves it, if nothing else does.
func consume(t *testing.T, d *harness.Daemon, topic, group string) *client.Consumer {
	t.Helper()
	c, err := client.Dial(t.Context(), d.ClientAddr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	k, err := c.NewConsumer(t.Context(), topic, group, client.ConsumerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// reject has a group reject every message of a topic whose value begins with "bad", and acknowledge the others. It
// returns what it was given: values, with "again:" in front of those that were redriven.
func reject(t *testing.T, d *harness.Daemon, topic, group string, n int) []string {
	t.Helper()
	k := consume(t, d, topic, group)
	var got []string
	for len(got) < n {
		select {
		case m := <-k.Messages():
			v := string(m.Value)
			if m.Redriven {
				v = "again:" + v
			}
			got = append(got, v)
			var err error
			if strings.HasPrefix(v, "bad") {
				err = m.Nack(protocol.NackReject)
			} else {
				err = m.AckSync(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%d messages of %d came: %q", len(got), n, got)
		}
	}
	if err := k.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return got
}

func wantSums(t *testing.T, d *harness.Daemon) {
	t.Helper()
	if _, err := d.CheckSums(); err != nil {
		t.Fatal(err)
	}
}

// waitDLQ waits until a group has so many dead letters.
func waitDLQ(t *testing.T, d *harness.Daemon, topic, group string, n uint64) {
	t.Helper()
	for range 6000 {
		g, err := d.GroupStats(topic, group)
		if err == nil && g.DLQ == n {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	g, err := d.GroupStats(topic, group)
	t.Fatalf("%+v, %v, want %d dead letters", g, err, n)
}

func TestDLQ_ListShowExportRedrive(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "3")
	run(t, d, 0, "", "groups", "create", "billing", "--topic", "orders")
	if out := run(t, d, 0, "", "dlq", "list", "billing"); out != "" {
		t.Fatalf("dead letters of a group that has none: %q", out)
	}
	run(t, d, 0, "", "pub", "orders", "bad1", "--partition", "0")
	run(t, d, 0, "", "pub", "orders", "bad2", "good", "--key", "k2")
	run(t, d, 0, "bad\x00\xff3\n", "pub", "orders", "--file", "-", "--partition", "2")
	reject(t, d, "orders", "billing", 4)
	waitDLQ(t, d, "orders", "billing", 3)
	wantSums(t, d)

	var rows []struct {
		Sequence, Source_Sequence uint64
		Topic, Reason             string
		Partition                 uint16
		Key                       any
	}
	if err := json.Unmarshal([]byte(run(t, d, 0, "", "dlq", "list", "billing", "--json")), &rows); err != nil || len(rows) != 3 {
		t.Fatalf("%+v, %v", rows, err)
	}
	if lines := strings.Split(strings.TrimSpace(run(t, d, 0, "", "dlq", "list", "billing", "--key", "k2")), "\n"); len(lines) != 1 ||
		len(strings.Split(lines[0], "\t")) != 9 || !strings.Contains(lines[0], "\trejected\t1\t") {
		t.Fatalf("%q", lines)
	}
	for _, args := range [][]string{{"--topic", "other"}, {"--reason", "expired"}, {"--since", "2030-01-01T00:00:00Z"}, {"--until", "1h"}, {"--key", ""}} {
		out := run(t, d, 0, "", append([]string{"dlq", "list", "billing"}, args...)...)
		if want := map[bool]int{true: 2}[args[0] == "--key"]; strings.Count(out, "\n") != want {
			t.Errorf("%v: %q, want %d lines", args, out, want)
		}
	}
	for seq := 1; seq <= 3; seq++ {
		out := run(t, d, 0, "", "dlq", "show", "billing", fmt.Sprint(seq))
		if !strings.Contains(out, fmt.Sprintf("sequence\t%d\n", seq)) || !strings.Contains(out, "reason\trejected\n") || !strings.Contains(out, "value\t\"bad") {
			t.Errorf("%q", out)
		}
	}
	run(t, d, 4, "", "dlq", "show", "billing", "4")
	run(t, d, 2, "", "dlq", "list", "billing", "--reason", "bored")
	run(t, d, 2, "", "dlq", "redrive", "billing", "--since", "soon")
	exported := run(t, d, 0, "", "dlq", "export", "billing")
	for lines := bufio.NewScanner(strings.NewReader(exported)); lines.Scan(); {
		var o struct{ Value, Value_Base64 *string }
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil || (o.Value == nil) == (o.Value_Base64 == nil) {
			t.Fatalf("%s: %v", lines.Text(), err)
		}
	}
	if strings.Count(exported, "\n") != 3 || !strings.Contains(exported, "YmFkAP8z") {
		t.Fatalf("%s", exported)
	}

	if out := run(t, d, 0, "", "dlq", "redrive", "billing", "--dry-run"); strings.Count(out, "\n") != 3 {
		t.Fatalf("dry run: %q", out)
	}
	if out := run(t, d, 0, "", "dlq", "redrive", "billing", "--key", "k2"); out != "1\t2\t0\n" {
		t.Fatalf("redriven %q", out)
	}
	if out := run(t, d, 0, "", "dlq", "redrive", "billing", "--limit", "1"); out != "1\t1\t0\n" {
		t.Fatalf("redriven %q", out)
	}
	if out := run(t, d, 0, "", "dlq", "redrive", "billing"); out != "1\t0\t0\n" {
		t.Fatalf("redriven %q", out)
	}
	if out := run(t, d, 0, "", "dlq", "redrive", "billing"); out != "0\t0\t0\n" {
		t.Fatalf("redriven %q", out)
	}
	got := map[string]bool{}
	for _, v := range reject(t, d, "orders", "billing", 3) {
		got[v] = true
	}
	if !got["again:bad1"] || !got["again:bad2"] || !got["again:bad\x00\xff3"] {
		t.Fatalf("%v", got)
	}
	k2 := protocol.Route([]byte("k2"), 3)
	for i, last := range lastSequences(t, d, "orders") {
		want := map[bool]uint64{true: 3}[i == int(k2)]
		if i != 1 {
			want += 2
		}
		if last != want {
			t.Errorf("partition %d has %d messages, want %d: redriven into another one?", i, last, want)
		}
	}
	run(t, d, 0, "", "topics", "delete", "orders")
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "3")
	wantSums(t, d)
}

// published is how many messages a topic has.
func published(t *testing.T, d *harness.Daemon, topic string) (n uint64) {
	t.Helper()
	for _, last := range lastSequences(t, d, topic) {
		n += last
	}
	return n
}

// lastSequences are those of a topic's partitions.
func lastSequences(t *testing.T, d *harness.Daemon, topic string) (list []uint64) {
	t.Helper()
	var stats struct {
		Topics []struct {
			Parts []struct {
				Last uint64 `json:"last_seq"`
			} `json:"partition_stats"`
		} `json:"topics"`
	}
	if err := d.FetchJSON("/stats?topic="+topic, &stats); err != nil {
		t.Fatal(err)
	}
	for _, p := range stats.Topics[0].Parts {
		list = append(list, p.Last)
	}
	return list
}

// A redrive that is killed at any time and started again puts every message back; a kill doubles 256 of them at most.
func TestDLQ_RedriveIsResumable(t *testing.T) {
	t.Parallel()
	const letters, window = 3000, 256
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "2")
	var text strings.Builder
	for i := range letters {
		fmt.Fprintf(&text, "bad %d\n", i)
	}
	run(t, d, 0, text.String(), "pub", "orders", "--file", "-")
	reject(t, d, "orders", "billing", letters)
	waitDLQ(t, d, "orders", "billing", letters)
	kills := 0
	for done := false; !done; {
		cmd := exec.Command(mortarmq, "dlq", "redrive", "billing", "--server", d.ClientAddr, "--admin", d.AdminAddr)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for enough := published(t, d, "orders") + letters/10; ; {
			select {
			case err := <-ended:
				if err != nil {
					t.Fatalf("after %d kills: %v", kills, err)
				}
				done = true
			case <-time.After(time.Millisecond):
				if kills >= 4 || published(t, d, "orders") < enough {
					continue
				}
				_ = cmd.Process.Kill()
				<-ended
				kills++
			}
			break
		}
	}
	k := consume(t, d, "orders", "billing")
	type place struct {
		partition uint16
		sequence  uint64
	}
	back, places := map[string]bool{}, map[place]bool{}
	for len(back) < letters {
		select {
		case m := <-k.Messages():
			if !m.Redriven {
				t.Fatalf("%q is not marked", m.Value)
			}
			back[string(m.Value)] = true
			places[place{m.Partition, m.Sequence}] = true
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%d of %d messages are back after %d kills", len(back), letters, kills)
		}
	}
	doubled := len(places) - letters
	t.Logf("%d kills, %d messages were put back twice", kills, doubled)
	if doubled > kills*window {
		t.Errorf("%d messages were put back twice after %d kills, at most %d each are allowed", doubled, kills, window)
	}
	if err := k.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantSums(t, d)
}

// Dead letters that nobody needs any more are deleted with their topic, which is made anew for the next one.
func TestDLQ_TopicIsDeletedAndMadeAnew(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := start(t, dir)
	run(t, d, 0, "", "topics", "create", "orders", "--partitions", "2")
	run(t, d, 0, "bad 1\nbad 2\n", "pub", "orders", "--file", "-")
	reject(t, d, "orders", "billing", 2)
	waitDLQ(t, d, "orders", "billing", 2)
	run(t, d, 0, "", "dlq", "redrive", "billing", "--dry-run") // a group of the topic goes with it
	if got := run(t, d, 0, "", "topics", "delete", "$dlq.billing"); got != "deleted\n" {
		t.Fatalf("%q", got)
	}
	if got := run(t, d, 0, "", "dlq", "list", "billing"); got != "" {
		t.Fatalf("dead letters that were deleted: %q", got)
	}
	if got := run(t, d, 0, "", "topics", "delete", "$dlq.billing"); got != "not_found\n" {
		t.Fatalf("%q", got)
	}
	for life, want := range []string{"bad 3", "bad 4"} {
		run(t, d, 0, want+"\n", "pub", "orders", "--file", "-")
		reject(t, d, "orders", "billing", 1)
		waitDLQ(t, d, "orders", "billing", uint64(3+life))
		exported := run(t, d, 0, "", "dlq", "export", "billing")
		if strings.Count(exported, "\n") != 1+life || !strings.Contains(exported, want) {
			t.Fatalf("life %d: %s", life, exported)
		}
		d.Kill()
		d = start(t, dir)
	}
	if got := run(t, d, 0, "", "dlq", "redrive", "billing"); got != "2\t0\t0\n" {
		t.Fatalf("redriven, left, failed: %q", got)
	}
	wantSums(t, d)
}

func TestGroups_ResetAndDelete(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "t", "--partitions", "1")
	run(t, d, 0, "", "pub", "t", "1", "2", "3", "4")
	if out := run(t, d, 0, "", "sub", "t", "--group", "g", "--exit-empty"); out != "1\n2\n3\n4\n" {
		t.Fatalf("%q", out)
	}
	reset := func(want int, args ...string) string {
		t.Helper()
		return run(t, d, want, "", append([]string{"groups", "reset", "g", "--topic", "t"}, args...)...)
	}
	if out := reset(0, "--to", "2", "--dry-run"); out != "0\t4\t1\n" {
		t.Fatalf("%q", out)
	}
	for _, args := range [][]string{{}, {"--to", "yesterday"}, {"--to", "0"}, {"--to", "1", "--partition", "-2"}} {
		reset(2, args...)
	}
	reset(4, "--to", "1", "--partition", "1")
	run(t, d, 4, "", "groups", "reset", "none", "--topic", "t", "--to", "1")
	reset(0, "--to", "3")
	if out := run(t, d, 0, "", "sub", "t", "--group", "g", "--exit-empty"); out != "3\n4\n" {
		t.Fatalf("%q", out)
	}
	reset(0, "--to", "1h")
	k := consume(t, d, "t", "g")
	reset(4, "--to", "latest")
	if out := reset(0, "--to", "latest", "--force"); !strings.HasSuffix(out, "\t4\n") {
		t.Fatalf("%q", out)
	}
	if err := k.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := reset(0, "--to", "earliest", "--json"); out != `[{"partition":0,"from":4,"to":0}]`+"\n" {
		t.Fatalf("%q", out)
	}
	wantSums(t, d)
	for _, want := range []string{"deleted\n", "not_found\n"} {
		if out := run(t, d, 0, "", "groups", "delete", "g", "--topic", "t"); out != want {
			t.Fatalf("%q, want %q", out, want)
		}
	}
	if out := run(t, d, 0, "", "groups", "list"); out != "" {
		t.Fatalf("%q", out)
	}
	wantSums(t, d)
}

func TestGroups_CreateAndSet(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	run(t, d, 0, "", "topics", "create", "t", "--partitions", "1")
	create := []string{"groups", "create", "g", "--topic", "t", "--retry", "10ms", "--max-attempts", "2", "--lease", "20s"}
	for _, want := range []string{"created\n", "existed\n"} {
		if out := run(t, d, 0, "", create...); out != want {
			t.Fatalf("%q, want %q", out, want)
		}
	}
	if out := run(t, d, 0, "", "groups", "create", "g", "--topic", "t"); out != "existed\n" {
		t.Fatalf("%q", out)
	}
	if out := run(t, d, 4, "", "groups", "create", "g", "--topic", "t", "--ordered"); out != "mismatch\n" {
		t.Fatalf("%q", out)
	}
	for want, all := range map[int][][]string{
		2: {{"create", "h"}, {"create", "h", "--topic", "t", "--from", "here"}, {"create", "h", "--topic", "t", "--retry", "soon"}, {"set", "g"}},
		4: {{"create", "h", "--topic", "none"}, {"create", "h", "--topic", "t", "--strategy", "luck"},
			{"create", "h", "--topic", "t", "--max-attempts", "0"}, {"set", "h", "--topic", "t"}},
	} {
		for _, args := range all {
			if out := run(t, d, want, "", append([]string{"groups"}, args...)...); out != "" {
				t.Errorf("%v: %q", args, out)
			}
		}
	}
	if out := run(t, d, 0, "", "groups", "set", "g", "--topic", "t", "--max-attempts", "1", "--json"); out != "{\"result\":\"set\"}\n" {
		t.Fatalf("%q", out)
	}
	run(t, d, 0, "", "pub", "t", "poison")
	k := consume(t, d, "t", "g")
	m := <-k.Messages()
	if err := m.Nack(protocol.NackRetryLater); err != nil {
		t.Fatal(err)
	}
	waitDLQ(t, d, "t", "g", 1) // the first failure is the last: the new maximum counts
	if err := k.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantSums(t, d)
}
