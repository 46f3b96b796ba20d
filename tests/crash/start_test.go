package crash

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
	"github.com/mortarmq/mortarmq/tests/harness"
)

// startWithOrders starts the broker, connects to it until the test ends and makes sure of the topic "orders".
func startWithOrders(t *testing.T, target *DaemonTarget) (addr string, conn *harness.Conn, topic protocol.DeclareResult) {
	t.Helper()
	addr, err := target.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if conn, err = harness.Dial(addr, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if topic, err = conn.Declare("orders", 2); err != nil {
		t.Fatal(err)
	}
	return addr, conn, topic
}

// withData returns a data directory that a broker with one topic, one group and a few messages was shut down on.
func withData(t *testing.T) *DaemonTarget {
	t.Helper()
	target := newTarget(t, nil)
	addr, conn, topic := startWithOrders(t, target)
	for i := range 20 {
		pub := protocol.Pub{TopicID: topic.TopicID, Partition: uint16(i % 2), Value: fmt.Appendf(nil, "order %d", i)}
		if _, err := conn.Publish(&pub); err != nil {
			t.Fatal(err)
		}
	}
	if err := consumeSome(addr, topic.TopicID, 5); err != nil {
		t.Fatal(err)
	}
	if err := target.Stop(); err != nil {
		t.Fatal(err)
	}
	return target
}

// consumeSome acknowledges n messages of group "billing", waits for the answers and leaves the group.
func consumeSome(addr string, topic uint16, n int) error {
	conn, sub, err := subscribe(addr, topic, "billing", protocol.SubFlagStream, 0)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Net().SetDeadline(time.Now().Add(defaultPatience)); err != nil {
		return err
	}
	for sent, acked := 0, 0; acked < n; {
		f, err := conn.Next()
		if err != nil {
			return fmt.Errorf("%d of %d messages acknowledged: %w", acked, n, err)
		}
		var out []byte
		switch f.Op {
		case protocol.OpNotice:
			out, err = confirm(f.Payload, &sub)
		case protocol.OpMsg:
			var msg protocol.Msg
			if err = msg.Decode(f.Payload); sent < n {
				ack := ackOf(&msg)
				out = ack.AppendFrame(nil)
				sent++
			}
		case protocol.OpOK:
			var ok protocol.OKFrame
			if err = ok.Decode(f.Payload); ok.RequestOp == protocol.OpAck {
				acked++
			}
		default:
			err = cmp.Or(f.Err(), fmt.Errorf("unexpected %v", f.Op))
		}
		if err != nil {
			return err
		}
		if err := conn.Send(out); err != nil {
			return err
		}
	}
	leave := protocol.Heartbeat{SubscriptionID: sub.SubscriptionID, MemberID: sub.MemberID, MembershipEpoch: sub.MembershipEpoch,
		AssignmentEpoch: sub.AssignmentEpoch, State: protocol.MemberLeave}
	_, err = conn.Request(protocol.OpHeartbeat, leave.AppendFrame(nil))
	return err
}

// filesWithMagic returns the files below dir that start with magic.
func filesWithMagic(t *testing.T, dir, magic string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		head := make([]byte, len(magic))
		if n, _ := f.Read(head); string(head[:n]) == magic {
			list = append(list, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// The format version is the byte behind the magic in every file (storage, "Magics"). What stands in a newer file doesn't have
// the checksum that this version would.
func TestStart_RefusesAFormatVersionThatIsTooNew(t *testing.T) {
	for _, magic := range []string{"MMJL", "MMQS", "MMCK", "MMML", "MMLQ"} {
		t.Run(magic, func(t *testing.T) {
			t.Parallel()
			target := withData(t)
			files := filesWithMagic(t, target.opts.DataDir, magic)
			if len(files) == 0 {
				t.Fatalf("no file with magic %s in %s", magic, target.opts.DataDir)
			}
			for _, path := range files {
				overwrite(t, path, 4, []byte{0xEE})
				overwrite(t, path, 8, []byte{0xEE}) // the version alone would be a damaged byte: the checksum tells
			}
			_, err := target.Start(t.Context())
			var start *harness.StartError
			if !errors.As(err, &start) {
				t.Fatalf("the broker started on a %s of version 238: %v", magic, err)
			}
			if start.ExitCode <= 0 {
				t.Errorf("exit code %d, want one above 0", start.ExitCode)
			}
			named := false
			for _, path := range files {
				named = named || strings.Contains(start.Log, filepath.Base(path))
			}
			if !named || !strings.Contains(start.Log, "238") {
				t.Errorf("the refusal doesn't name one of %v and version 238:\n%s", files, start.Log)
			}
		})
	}
}

func overwrite(t *testing.T, path string, off int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

func TestStart_RefusesADirectoryThatAnotherBrokerUses(t *testing.T) {
	t.Parallel()
	target := newTarget(t, nil)
	if _, err := target.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := NewDaemonTarget(target.opts.Binary, target.opts.DataDir, nil)
	_, err := second.Start(t.Context())
	var start *harness.StartError
	if !errors.As(err, &start) {
		t.Fatalf("a second broker started on the same data directory: %v", err)
	}
	if start.ExitCode <= 0 || !strings.Contains(start.Log, target.opts.DataDir) {
		t.Errorf("exit code %d, want one above 0 and a text that names the directory:\n%s", start.ExitCode, start.Log)
	}
	if err := target.Crashed(); err != nil {
		t.Errorf("the first broker: %v", err)
	}
	if err := target.Stop(); err != nil {
		t.Error(err)
	}
}

func TestStart_AfterACleanShutdownNothingIsReplayed(t *testing.T) {
	t.Parallel()
	target := withData(t)
	// What was acknowledged stays so; what was not comes back.
	addr, _, topic := startWithOrders(t, target)
	if !topic.Existed {
		t.Error("the topic is gone")
	}
	if err := consumeSome(addr, topic.TopicID, 15); err != nil {
		t.Errorf("the 15 messages that were left: %v", err)
	}
	if err := target.Stop(); err != nil {
		t.Error(err)
	}
}

// Damage to one partition's files must not take the others with it, and never the broker.
func TestStart_DamageOfOnePartitionLeavesTheOthers(t *testing.T) {
	segment := func(t *testing.T, dir string) string {
		t.Helper()
		list, err := filepath.Glob(filepath.Join(dir, "topics", "*", "0", "*.mqs"))
		if err != nil || len(list) == 0 {
			t.Fatalf("no segment of partition 0 below %s: %v", dir, err)
		}
		return list[len(list)-1]
	}
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, dir string)
		intact []uint16
	}{
		{"a bit of a message flips", func(t *testing.T, dir string) {
			path := segment(t, dir)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			at := bytes.Index(text, []byte("order 2"))
			if at < 0 {
				t.Fatalf("%s does not hold the message", path)
			}
			overwrite(t, path, int64(at), []byte("0rder 2"))
		}, []uint16{1}},
		{"the segment is cut off", func(t *testing.T, dir string) {
			if err := os.Truncate(segment(t, dir), 4096); err != nil {
				t.Fatal(err)
			}
		}, []uint16{1}},
		{"the segment is gone", func(t *testing.T, dir string) {
			if err := os.Remove(segment(t, dir)); err != nil {
				t.Fatal(err)
			}
		}, []uint16{1}},
		{"the partition's checkpoint is gone", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(filepath.Dir(segment(t, dir)), "checkpoint.mqc")); err != nil {
				t.Fatal(err)
			}
		}, []uint16{0, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			target := withData(t)
			tt.damage(t, target.opts.DataDir)
			for range 2 { // what was found stays found
				addr, err := target.Start(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				got, err := readPartitions(addr, "after", tt.intact, 10)
				if err != nil {
					t.Errorf("%v\n%s", err, target.Daemon().Log())
				}
				for _, part := range tt.intact {
					if got[part] != 10 {
						t.Errorf("%d messages of partition %d came, want 10", got[part], part)
					}
				}
				if err := target.Stop(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// readPartitions reads with a group of its own, without acknowledging, until n messages of each of the given partitions
// have come.
func readPartitions(addr, group string, parts []uint16, n int) (map[uint16]int, error) {
	got := map[uint16]int{}
	lookup, err := harness.Dial(addr, "")
	if err != nil {
		return got, err
	}
	defer lookup.Close()
	topic, err := lookup.Declare("orders", 2)
	if err != nil {
		return got, err
	}
	conn, sub, err := subscribe(addr, topic.TopicID, group, protocol.SubFlagStream, 0)
	if err != nil {
		return got, err
	}
	defer conn.Close()
	if err := conn.Net().SetDeadline(time.Now().Add(defaultPatience)); err != nil {
		return got, err
	}
	for {
		missing := false
		for _, part := range parts {
			missing = missing || got[part] < n
		}
		if !missing {
			break
		}
		f, err := conn.Next()
		if err != nil {
			return got, err
		}
		switch f.Op {
		case protocol.OpNotice:
			frame, err := confirm(f.Payload, &sub)
			if err := errors.Join(err, conn.Send(frame)); err != nil {
				return got, err
			}
		case protocol.OpMsg:
			var msg protocol.Msg
			if err := msg.Decode(f.Payload); err != nil {
				return got, err
			}
			got[msg.Partition]++
		case protocol.OpErr, protocol.OpOK: // an error about the damaged partition is expected
		default:
			return got, fmt.Errorf("unexpected %v", f.Op)
		}
	}
	leave := protocol.Heartbeat{SubscriptionID: sub.SubscriptionID, MemberID: sub.MemberID, MembershipEpoch: sub.MembershipEpoch,
		AssignmentEpoch: sub.AssignmentEpoch, State: protocol.MemberLeave}
	_, err = conn.Request(protocol.OpHeartbeat, leave.AppendFrame(nil))
	return got, err
}
