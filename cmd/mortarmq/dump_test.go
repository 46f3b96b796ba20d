package main

import (
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/engine/dedupsnap"
	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/wal"
)

const block = 4096

// crcAt puts the CRC-32C of b without the 4 bytes at off there.
func crcAt(b []byte, off int) {
	table := crc32.MakeTable(crc32.Castagnoli)
	binary.BigEndian.PutUint32(b[off:], crc32.Update(crc32.Checksum(b[:off], table), table, b[off+4:]))
}

// logFile returns a log file as spec'd: a header block and records, padded to a whole block.
func logFile(magic string, topic, partition uint16, records ...wal.Record) []byte {
	b := make([]byte, block, 4*block)
	copy(b, magic)
	b[4], b[5] = 1, 1
	binary.BigEndian.PutUint16(b[6:], topic)
	binary.BigEndian.PutUint16(b[8:], partition)
	binary.BigEndian.PutUint32(b[12:], block)
	binary.BigEndian.PutUint64(b[16:], uint64(records[0].Sequence))
	crcAt(b, 32)
	for i := range records {
		r := &records[i]
		at := len(b)
		b = append(b, make([]byte, wal.RecordSize(len(r.Key), len(r.Value)))...)
		wal.PutRecord(b[at:], r)
	}
	return append(b, make([]byte, -len(b)&(block-1))...)
}

// snapshotFile returns a snapshot as spec'd.
func snapshotFile(magic string, position uint64, data []byte) []byte {
	b := make([]byte, 32, 32+len(data))
	copy(b, magic)
	b[4] = 1
	binary.BigEndian.PutUint32(b[12:], 3)
	binary.BigEndian.PutUint64(b[16:], position)
	binary.BigEndian.PutUint64(b[24:], uint64(len(data)))
	b = append(b, data...)
	crcAt(b, 8)
	return b
}

// stateFile returns a file of two slots as spec'd; fill puts the state into one.
func stateFile(magic string, fill func(b []byte)) []byte {
	b := make([]byte, 2*block)
	for i := range 2 {
		slot := b[i*block:]
		copy(slot, magic)
		slot[len(magic)] = 1
		binary.BigEndian.PutUint64(slot[8:], 6)
		fill(slot)
		binary.BigEndian.PutUint64(slot[120:], xxhash.Sum64(slot[:120]))
	}
	return b
}

// tableFile returns a checkpoint table of a node of a cluster as spec'd, with a row for a partition that goes on and one for
// one that began anew.
func tableFile() []byte {
	b := make([]byte, 2*block)
	copy(b, "MMCK")
	b[4] = 1
	binary.BigEndian.PutUint64(b[8:], 3)
	binary.BigEndian.PutUint32(b[16:], block)
	binary.BigEndian.PutUint32(b[20:], 2)
	binary.BigEndian.PutUint32(b[24:], 1)
	binary.BigEndian.PutUint64(b[32:], 20)
	binary.BigEndian.PutUint64(b[40:], 20)
	binary.BigEndian.PutUint32(b[52:], 4)
	binary.BigEndian.PutUint64(b[56:], 17)
	rows := b[64:]
	rows[0], rows[3], rows[5] = 1, 3, 1
	binary.BigEndian.PutUint32(rows[12:], 2*block)
	binary.BigEndian.PutUint64(rows[16:], 9)
	binary.BigEndian.PutUint64(rows[24:], 7)
	rows = rows[32:]
	rows[0], rows[1], rows[3], rows[5] = 1, 1, 3, 1
	binary.BigEndian.PutUint64(rows[16:], 7)
	crcAt(b[:128], 48)
	return b
}

// dataDir makes a small data directory.
func dataDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	put := func(name string, content []byte) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("topics/3/1/00000000000000000007.mqs", logFile("MMQS", 3, 1,
		wal.Record{Sequence: 7, LeaderEpoch: 2, TimestampMs: 1000, ProducerID: 5, ProducerSeq: 6, Key: []byte("key"), Value: []byte("first value")},
		wal.Record{Sequence: 8, LeaderEpoch: 2, TimestampMs: 2000, Value: []byte{0xff, '\n', 0}}))

	book := ledger.NewBook(nil, nil)
	opts := ledger.DefaultOptions()
	c := book.Open(ledger.Key{Group: 1, Topic: 3, Partition: 1}, &opts, 6)
	start := book.AppendRecord(nil, 1000)
	var fx ledger.Effects
	if err := book.Apply(start, 0, &fx); err != nil {
		t.Fatal(err)
	}
	c.Committed(8)
	put("ledger/0/delivery.mql", logFile("MMLQ", 0, 0, wal.Record{Sequence: 1, LeaderEpoch: 2, Value: start}))
	put("ledger/0/cursor.mqc", snapshotFile("MMCU", 1, book.AppendSnapshot(nil, 0, 1000)))

	state := metadata.NewState()
	created := &metadata.TopicCreated{Topic: 1, Partitions: 2, Name: "orders"}
	if err := state.Apply(1, 2, &metadata.LeaderChanged{Node: 0}); err != nil {
		t.Fatal(err)
	}
	if err := state.Apply(2, 2, created); err != nil {
		t.Fatal(err)
	}
	put("metadata/mmml-00000000000000000002.log", logFile("MMML", 0, 0,
		wal.Record{Sequence: 2, LeaderEpoch: 2, Value: metadata.AppendMutation(nil, created)}))
	put("metadata/mmms-2-3.bin", snapshotFile("MMMS", 2, state.AppendSnapshot(nil)))

	window := dedupsnap.AppendWindow(dedupsnap.Append(nil), &dedupsnap.Window{Topic: 3, Partition: 1, ProducerID: 9,
		Runs: []dedupsnap.Run{{ProducerSeq: 1, Sequence: 7, Count: 2}}})
	put("journal/0/dedup.mmdd", snapshotFile("MMDD", 4, window))
	put("journal/0/partitions.mmck", tableFile())
	put("journal/0/catchup.mmcup", stateFile("MMCUP", func(b []byte) {
		b[6], b[17], b[23], b[27], b[39], b[43], b[55], b[67], b[71], b[79], b[87] = 5, 2, 4, 3, 11, 4, 16, 9, 8, 7, 6
	}))
	put("replica.mmrs", stateFile("MMRS", func(b []byte) {
		b[5], b[7], b[16], b[35], b[37], b[39] = 2, 3, 0xab, 4, 1, 2
	}))
	put("layout.json", []byte("{}\n"))
	return dir
}

const goldenDump = `DIR/journal/0/catchup.mmcup	0	catchup	slot=0 generation=6 leader=2 epoch=4 from_index=11 from_epoch=3 target_index=16 target_epoch=4 begun=1970-01-01T00:00:00.000Z streams=9 streams_done=8 records=7 bytes=6 metadata=true cursors=false windows=true
DIR/journal/0/catchup.mmcup	4096	catchup	slot=1 generation=6 leader=2 epoch=4 from_index=11 from_epoch=3 target_index=16 target_epoch=4 begun=1970-01-01T00:00:00.000Z streams=9 streams_done=8 records=7 bytes=6 metadata=true cursors=false windows=true
DIR/journal/0/dedup.mmdd	0	dedup_snapshot	epoch=3 position=4 bytes=N
DIR/journal/0/dedup.mmdd	0	producer	topic_id=3 partition=1 producer_id=9 producer_seqs_at_sequences=1-2:7-8
DIR/journal/0/partitions.mmck	0	table	slot=0 current=true journal=0 generation=3 epoch=1 round=20 commit=20 log_index=17 log_epoch=4 rows=1
DIR/journal/0/partitions.mmck	0	row	topic_id=3 partition=1 next_sequence=9 base_sequence=7 durable_offset=8192
DIR/journal/0/partitions.mmck	0	begin	topic_id=3 partition=1 first_sequence=7
DIR/layout.json	0	other	bytes=3
DIR/ledger/0/cursor.mqc	0	cursor_checkpoint	epoch=3 position=1 bytes=N
DIR/ledger/0/cursor.mqc	0	cursor	group_id=1 topic_id=3 partition=1 start=6 ack_floor=6 delivered_up_to=6 acknowledged=0 dropped=0 retrying=0
DIR/ledger/0/delivery.mql	0	ledger	stream=ledger journal=0 base_sequence=1 created=1970-01-01T00:00:00.000Z
DIR/ledger/0/delivery.mql	4096	record	stream=ledger sequence=1 epoch=2 time=1970-01-01T00:00:00.000Z value_bytes=16
DIR/ledger/0/delivery.mql	4096	item	item=START group_id=1 topic_id=3 partition=1 floor=6
DIR/ledger/0/delivery.mql	4168	padding	length=4024
DIR/metadata/mmml-00000000000000000002.log	0	metadata_log	stream=metadata journal=0 base_sequence=2 created=1970-01-01T00:00:00.000Z
DIR/metadata/mmml-00000000000000000002.log	4096	record	stream=metadata sequence=2 epoch=2 time=1970-01-01T00:00:00.000Z mutation=topic_created topic_id=1 partitions=2 name=orders settings={}
DIR/metadata/mmml-00000000000000000002.log	4170	padding	length=4022
DIR/metadata/mmms-2-3.bin	0	metadata_snapshot	epoch=3 position=2 bytes=N
DIR/metadata/mmms-2-3.bin	0	state	mutation_id=2 epoch=2 leader=0 last_topic_id=1 last_group_id=0
DIR/metadata/mmms-2-3.bin	0	topic	topic_id=1 partitions=2 created_epoch=2 name=orders settings={}
DIR/replica.mmrs	0	node_state	slot=0 generation=6 node=3 cluster=ab000000000000000000000000000000 logs=2 promised_epoch=4 candidate=1 forming=false learner=true suspect=false
DIR/replica.mmrs	4096	node_state	slot=1 generation=6 node=3 cluster=ab000000000000000000000000000000 logs=2 promised_epoch=4 candidate=1 forming=false learner=true suspect=false
DIR/topics/3/1/00000000000000000007.mqs	0	segment	topic_id=3 partition=1 journal=0 base_sequence=7 created=1970-01-01T00:00:00.000Z
DIR/topics/3/1/00000000000000000007.mqs	4096	record	topic_id=3 partition=1 sequence=7 epoch=2 time=1970-01-01T00:00:01.000Z producer_id=5 producer_seq=6 key="key" value_bytes=11 value="first"...
DIR/topics/3/1/00000000000000000007.mqs	4166	record	topic_id=3 partition=1 sequence=8 epoch=2 time=1970-01-01T00:00:02.000Z value_bytes=3 value="\xff\n\x00"
DIR/topics/3/1/00000000000000000007.mqs	4225	padding	length=3967
`

// snapshotBytes is how long a snapshot's content is: the business of the packages that encode it.
var snapshotBytes = regexp.MustCompile(`(position=\d+) bytes=\d+`)

func TestDump_PrintsEveryFileOfADirectory(t *testing.T) {
	dir := dataDir(t)
	r := mortarmq(t, "", "dump", "--max-value", "5", dir)
	got := snapshotBytes.ReplaceAllString(strings.ReplaceAll(r.stdout, dir, "DIR"), "$1 bytes=N")
	if r.code != exitDone || got != goldenDump {
		t.Errorf("exit code %d, errors %s, output:\n%s", r.code, r.stderr, got)
	}
	mortarmq(t, "", "dump", "--check", dir).want(t, exitDone, "")
}

func TestDump_JSONHasAnObjectPerLine(t *testing.T) {
	dir := dataDir(t)
	r := mortarmq(t, "", "dump", "--json", dir)
	lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
	if r.code != exitDone || len(lines) != strings.Count(goldenDump, "\n") {
		t.Fatalf("exit code %d, %d lines, errors %s", r.code, len(lines), r.stderr)
	}
	seen := map[string]bool{}
	for _, line := range lines {
		var o struct {
			File   string
			Offset *int64
			Type   string
			Value  json.RawMessage
		}
		if err := json.Unmarshal([]byte(line), &o); err != nil || o.File == "" || o.Offset == nil || o.Type == "" {
			t.Errorf("%v: %s", err, line)
		}
		seen[string(o.Value)] = true
	}
	if !seen[`"first value"`] || !seen[`{"base64":"/woA"}`] {
		t.Errorf("values %v", seen)
	}
}

func TestDump_DamageHasOffsetAndReasonAndExitsWith1(t *testing.T) {
	for _, c := range []struct {
		file string
		at   int
		want string // of standard output, after the file's name
	}{
		{"topics/3/1/00000000000000000007.mqs", 4096 + 60, "\t4096\tdamage\ttopic_id=3 partition=1 sequence=7 skipped_bytes=70 reason=\"checksum is 0x"},
		{"ledger/0/delivery.mql", 4096 + 60, "\t4096\tdamage\tstream=ledger sequence=1 skipped_bytes=4096 reason=\"checksum is 0x"},
		{"ledger/0/cursor.mqc", 40, "\t0\tdamage\tskipped_bytes="},
		{"metadata/mmms-2-3.bin", 4, "\t4\tdamage\tskipped_bytes="},
		{"journal/0/dedup.mmdd", 0, "\t0\tdamage\t"},
		{"journal/0/catchup.mmcup", 30, "\t0\tdamage\tskipped_bytes=4096 reason=\"the slot is torn or damaged"},
		{"replica.mmrs", 4096 + 36, "\t4096\tdamage\tskipped_bytes=4096 reason=\"the slot is torn or damaged"},
		{"journal/0/partitions.mmck", 55, "\t0\tdamage\tskipped_bytes=4096 reason=\"checksum is 0x"},
	} {
		t.Run(c.file, func(t *testing.T) {
			dir := dataDir(t)
			path := filepath.Join(dir, c.file)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			b[c.at] ^= 1
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			r := mortarmq(t, "", "dump", "--check", path)
			want := path + c.want
			if r.code != exitLocal || !strings.HasPrefix(r.stdout, want) || strings.Count(r.stdout, "\n") != 1 {
				t.Errorf("exit code %d, output %q, want a line that starts %q", r.code, r.stdout, want)
			}
			if !strings.Contains(r.stderr, "1 of 1 files are damaged") {
				t.Errorf("errors %s", r.stderr)
			}
		})
	}
}

// A record can be whole while what its owner put into it makes no sense.
func TestDump_WholeRecordWithSenselessContent(t *testing.T) {
	for name, magic := range map[string]string{"delivery.mql": "MMLQ", "mmml-00000000000000000001.log": "MMML"} {
		path := writeFile(t, name, string(logFile(magic, 0, 0, wal.Record{Sequence: 1, LeaderEpoch: 1, Value: []byte{1, 0xee, 0xee}})))
		r := mortarmq(t, "", "dump", "--check", path)
		if r.code != exitLocal || !strings.HasPrefix(r.stdout, path+"\t4096\tdamage\t") {
			t.Errorf("%s: exit code %d, output %q", name, r.code, r.stdout)
		}
	}
	for name, magic := range map[string]string{"cursor.mqc": "MMCU", "mmms-1-1.bin": "MMMS", "dedup.mmdd": "MMDD"} {
		path := writeFile(t, name, string(snapshotFile(magic, 1, []byte{1, 2, 3})))
		r := mortarmq(t, "", "dump", "--check", path)
		if r.code != exitLocal || !strings.HasPrefix(r.stdout, path+"\t0\tdamage\t") {
			t.Errorf("%s: exit code %d, output %q", name, r.code, r.stdout)
		}
	}
}

// FuzzDump: whatever the files hold, dump neither panics nor fails without saying that there is damage.
func FuzzDump(f *testing.F) {
	value := wal.Record{Sequence: 1, LeaderEpoch: 1, Value: []byte{1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}}
	for _, magic := range []string{"MMQS", "MMLQ", "MMML"} {
		f.Add(logFile(magic, 0, 0, value), false)
	}
	for _, magic := range []string{"MMCU", "MMMS", "MMDD"} {
		f.Add(snapshotFile(magic, 1, []byte{1, 0, 0, 0, 0}), true)
	}
	path := filepath.Join(f.TempDir(), "file")
	f.Fuzz(func(t *testing.T, b []byte, snapshot bool) {
		if snapshot && len(b) > 32 { // a right checksum lets the content through
			binary.BigEndian.PutUint64(b[24:], uint64(len(b)-32))
			crcAt(b, 8)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, flag := range []string{"--json", "--check"} {
			if r := mortarmq(t, "", "dump", flag, path); r.code != exitDone && (r.code != exitLocal || !strings.Contains(r.stderr, "damaged")) {
				t.Fatalf("exit code %d, errors %s", r.code, r.stderr)
			}
		}
	})
}
