package dedupsnap

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
)

var sample = []Window{
	{Topic: 3, Partition: 1, ProducerID: 9, Runs: []Run{{1, 7, 2}}},
	{Topic: 65535, Partition: 65533, ProducerID: 1 << 63, Runs: []Run{{5, 100, 1}, {6, 102, 1000}}},
}

func encode(windows []Window) []byte {
	b := Append(nil)
	for i := range windows {
		b = AppendWindow(b, &windows[i])
	}
	return b
}

func decode(b []byte) (windows []Window, err error) {
	err = Decode(b, func(w *Window) error {
		c := *w
		c.Runs = append([]Run(nil), w.Runs...)
		windows = append(windows, c)
		return nil
	})
	return windows, err
}

// TestFormat_IsFrozen compares with bytes that are never made again: snapshots of earlier builds must stay readable.
func TestFormat_IsFrozen(t *testing.T) {
	text, err := os.ReadFile("testdata/windows-v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	frozen, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	if got := encode(sample); !bytes.Equal(got, frozen) {
		t.Errorf("encoded as\n%x, want\n%x", got, frozen)
	}
	if got, err := decode(frozen); err != nil || !reflect.DeepEqual(got, sample) {
		t.Errorf("decoded as %+v: %v", got, err)
	}
}

func TestDecode_RefusesWhatIsNeverWritten(t *testing.T) {
	good := encode(sample)
	for name, b := range map[string][]byte{
		"nothing":        nil,
		"a version":      append([]byte{2}, good[1:]...),
		"half a header":  good[:1+windowLen-1],
		"half a run":     good[:len(good)-1],
		"no runs":        encode([]Window{{Topic: 1, ProducerID: 1}}),
		"an empty run":   encode([]Window{{Topic: 1, ProducerID: 1, Runs: []Run{{1, 1, 0}}}}),
		"producer_seq 0": encode([]Window{{Topic: 1, ProducerID: 1, Runs: []Run{{0, 1, 1}}}}),
		"a gap":          encode([]Window{{Topic: 1, ProducerID: 1, Runs: []Run{{1, 1, 1}, {3, 3, 1}}}}),
		"an overflow":    encode([]Window{{Topic: 1, ProducerID: 1, Runs: []Run{{2, 1, 1<<64 - 1}}}}),
	} {
		if got, err := decode(b); err == nil {
			t.Errorf("%s: decoded as %+v", name, got)
		}
	}
	stop := errors.New("enough")
	if err := Decode(good, func(*Window) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the visitor's error came back as %v", err)
	}
}

// FuzzDecode: what is decoded is encoded again to the same bytes.
func FuzzDecode(f *testing.F) {
	f.Add(encode(sample))
	f.Add(encode(nil))
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if windows, err := decode(b); err == nil && !bytes.Equal(encode(windows), b) {
			t.Errorf("%x became %+v", b, windows)
		}
	})
}
