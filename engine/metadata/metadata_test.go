package metadata

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// goldenMutations are frozen: their bytes are on disks.
var goldenMutations = []struct {
	name string
	m    Mutation
	hex  string
}{
	{"topic created", &TopicCreated{Topic: 1, Partitions: 4, Name: "a.b"}, "0101 0001 0004 0003 612e62 0002 7b7d"},
	{"topic created with settings", &TopicCreated{Topic: 0x0102, Partitions: 0x0304, Name: "t", Settings: TopicSettings{Durability: protocol.DurabilityLocal}},
		"0101 0102 0304 0001 74 0016 7b226475726162696c697479223a226c6f63616c227d"},
	{"topic deleted", &TopicDeleted{Topic: 0xfffe}, "0102 fffe"},
	{"group created", &GroupCreated{Group: 2, Topic: 1, Policy: protocol.StartLatest, Name: "g", Settings: GroupSettings{MaxAttempts: 5}},
		"0103 0002 0001 01 0001 67 0012 7b226d61785f617474656d707473223a357d"},
	{"group deleted", &GroupDeleted{Group: 2}, "0104 0002"},
	{"member joined", &MemberJoined{Group: 2, Member: 0x0002000000000001, MembershipEpoch: 3}, "0105 0002 0002000000000001 00000003"},
	{"member left", &MemberLeft{Group: 2, Member: 0x0002000000000001, MembershipEpoch: 4}, "0106 0002 0002000000000001 00000004"},
	{"assigned", &Assigned{Group: 2, MembershipEpoch: 3, AssignmentEpoch: 1, Parts: []AssignedPart{{0, 9, 0}, {5, 9, 7}}},
		"0107 0002 00000003 00000001 00000002 0000 0000000000000009 0000000000000000 0005 0000000000000009 0000000000000007"},
	{"leader changed", &LeaderChanged{Node: 7}, "0108 0007"},
	{"group changed", &GroupChanged{Group: 2, Settings: GroupSettings{Strategy: StrategyCircle}}, "0109 0002 0015 7b227374726174656779223a22636972636c65227d"},
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMutation_KeepsItsBytes(t *testing.T) {
	for _, g := range goldenMutations {
		want := unhex(t, g.hex)
		if got := AppendMutation(nil, g.m); !bytes.Equal(got, want) {
			t.Errorf("%s encodes to %x, want %x", g.name, got, want)
		}
		got, err := DecodeMutation(want)
		if err != nil || !reflect.DeepEqual(got, g.m) {
			t.Errorf("%s decodes to %+v, %v", g.name, got, err)
		}
	}
}

func TestDecodeMutation_RefusesEveryTruncationAndATrailingByte(t *testing.T) {
	for _, g := range goldenMutations {
		b := AppendMutation(nil, g.m)
		for n := range b {
			if _, err := DecodeMutation(b[:n]); !errors.Is(err, ErrMalformed) {
				t.Errorf("%s cut to %d of %d bytes: %v", g.name, n, len(b), err)
			}
		}
		if _, err := DecodeMutation(append(b, 0)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s with a trailing byte: %v", g.name, err)
		}
	}
}

func TestDecodeMutation_RefusesHostileBytes(t *testing.T) {
	for name, s := range map[string]string{
		"version 2":             "0208 0007",
		"type 0":                "0100",
		"type 10":               "010a 0007",
		"start policy 2":        "0103 0002 0001 02 0001 67 0002 7b7d",
		"unknown setting":       "0101 0001 0004 0001 61 0008 7b2278223a20317d",
		"settings not JSON":     "0101 0001 0004 0001 61 0002 7b7b",
		"settings with a space": "0101 0001 0004 0001 61 0003 7b207d",
		"four billion parts":    "0107 0002 00000003 00000001 ffffffff 0000",
	} {
		if _, err := DecodeMutation(unhex(t, s)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecodeMutation(f *testing.F) {
	for _, g := range goldenMutations {
		f.Add(AppendMutation(nil, g.m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeMutation(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("error without ErrMalformed: %v", err)
			}
			return
		}
		if again := AppendMutation(nil, m); !bytes.Equal(again, b) {
			t.Fatalf("%x decodes and re-encodes to %x", b, again)
		}
		// No mutation may panic, whatever the state.
		s := newScript(1)
		for range 50 {
			s.next()
		}
		before := s.state.AppendSnapshot(nil)
		if err := s.state.Apply(s.state.MutationID()+1, s.state.Epoch(), m); err != nil && !bytes.Equal(before, s.state.AppendSnapshot(nil)) {
			t.Fatalf("a refused mutation changed the state: %v", err)
		}
	})
}

func FuzzDecodeSnapshot(f *testing.F) {
	for seed := range uint64(4) {
		s := newScript(seed)
		for range 40 {
			s.next()
		}
		f.Add(s.state.AppendSnapshot(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := DecodeSnapshot(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("error without ErrMalformed: %v", err)
			}
			return
		}
		if again := s.AppendSnapshot(nil); !bytes.Equal(again, b) {
			t.Fatalf("%x decodes and re-encodes to %x", b, again)
		}
	})
}

func TestFold_EqualsSnapshotPlusTail(t *testing.T) {
	const steps = 300
	for seed := range uint64(50) {
		type step struct {
			m     Mutation
			epoch uint32
		}
		s := newScript(seed)
		var log []step
		snapshots := make([][]byte, 0, steps+1)
		snapshots = append(snapshots, s.state.AppendSnapshot(nil))
		for range steps {
			m, epoch := s.next()
			decoded, err := DecodeMutation(AppendMutation(nil, m))
			if err != nil || !reflect.DeepEqual(m, decoded) {
				t.Fatalf("seed %d: %+v decodes to %+v, %v", seed, m, decoded, err)
			}
			log = append(log, step{decoded, epoch})
			snapshots = append(snapshots, s.state.AppendSnapshot(nil))
		}
		want := snapshots[steps]
		for _, at := range []int{0, 1, steps / 3, steps / 2, steps - 1, steps} {
			st, err := DecodeSnapshot(snapshots[at])
			if err != nil {
				t.Fatalf("seed %d, snapshot %d: %v", seed, at, err)
			}
			if got := st.AppendSnapshot(nil); !bytes.Equal(got, snapshots[at]) {
				t.Fatalf("seed %d: snapshot %d does not re-encode to itself", seed, at)
			}
			for i, l := range log[at:] {
				if err := st.Apply(uint64(at+i+1), l.epoch, l.m); err != nil {
					t.Fatalf("seed %d, from snapshot %d: %v", seed, at, err)
				}
			}
			if !bytes.Equal(st.AppendSnapshot(nil), want) {
				t.Fatalf("seed %d: the fold from snapshot %d differs from the fold from the start", seed, at)
			}
		}
	}
}

func TestSnapshot_KeepsItsBytes(t *testing.T) {
	s := NewState()
	for i, m := range []Mutation{
		&LeaderChanged{Node: 1},
		&TopicCreated{Topic: 1, Partitions: 2, Name: "orders"},
		&TopicCreated{Topic: 2, Partitions: 1, Name: "gone"},
		&GroupCreated{Group: 1, Topic: 1, Name: "billing"},
		&MemberJoined{Group: 1, Member: 5, MembershipEpoch: 1},
		&Assigned{Group: 1, MembershipEpoch: 1, AssignmentEpoch: 1, Parts: []AssignedPart{{0, 5, 1}, {1, 5, 0}}},
		&TopicDeleted{Topic: 2},
	} {
		if err := s.Apply(uint64(i+1), 3, m); err != nil {
			t.Fatal(err)
		}
	}
	got := hex.EncodeToString(s.AppendSnapshot(nil))
	want, err := os.ReadFile("testdata/snapshot-v1.hex")
	if err != nil {
		t.Fatalf("%v (the bytes now: %s)", err, got)
	}
	if got != strings.TrimSpace(string(want)) {
		t.Fatalf("the snapshot is now\n%s, frozen is\n%s", got, want)
	}
}

func TestDecodeSnapshot_RefusesEveryTruncation(t *testing.T) {
	s := newScript(3)
	for range 60 {
		s.next()
	}
	b := s.state.AppendSnapshot(nil)
	for n := range b {
		if _, err := DecodeSnapshot(b[:n]); !errors.Is(err, ErrMalformed) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(b), err)
		}
	}
}

func TestApply_RefusesStepsBackAndGaps(t *testing.T) {
	s := NewState()
	must := func(id uint64, epoch uint32, m Mutation) {
		t.Helper()
		if err := s.Apply(id, epoch, m); err != nil {
			t.Fatal(err)
		}
	}
	must(1, 5, &LeaderChanged{Node: 1})
	must(2, 5, &TopicCreated{Topic: 1, Partitions: 1, Name: "t"})
	for _, c := range []struct {
		id    uint64
		epoch uint32
		want  error
	}{
		{2, 5, protocol.CodeMutationFenced}, {1, 6, protocol.CodeMutationFenced}, {0, 5, protocol.CodeMutationFenced},
		{4, 5, ErrGap}, {3, 4, protocol.CodeMutationFenced},
	} {
		if err := s.Apply(c.id, c.epoch, &LeaderChanged{}); !errors.Is(err, c.want) {
			t.Errorf("mutation %d of epoch %d: %v, want %v", c.id, c.epoch, err, c.want)
		}
	}
	must(3, 6, &LeaderChanged{Node: 2})
	if s.Leader() != 2 || s.Epoch() != 6 || s.MutationID() != 3 {
		t.Fatalf("leader %d, epoch %d, mutation %d", s.Leader(), s.Epoch(), s.MutationID())
	}
}

// base is a state with topic 1 ("t", 3 partitions), group 1 ("g") with members 4 and 8, at assignment epoch 1.
func base(t *testing.T) *State {
	t.Helper()
	s := NewState()
	for i, m := range []Mutation{
		&TopicCreated{Topic: 1, Partitions: 3, Name: "t"},
		&GroupCreated{Group: 1, Topic: 1, Name: "g"},
		&MemberJoined{Group: 1, Member: 4, MembershipEpoch: 1},
		&MemberJoined{Group: 1, Member: 8, MembershipEpoch: 2},
		&Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 1, Parts: []AssignedPart{{0, 4, 1}, {1, 8, 2}, {2, 4, 3}}},
	} {
		if err := s.Apply(uint64(i+1), 1, m); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func TestApply_RefusesWhatContradictsTheState(t *testing.T) {
	for name, m := range map[string]Mutation{
		"topic id used":             &TopicCreated{Topic: 1, Partitions: 1, Name: "u"},
		"topic id 0":                &TopicCreated{Topic: 0, Partitions: 1, Name: "u"},
		"topic name used":           &TopicCreated{Topic: 2, Partitions: 1, Name: "t"},
		"topic without partitions":  &TopicCreated{Topic: 2, Name: "u"},
		"topic with too many":       &TopicCreated{Topic: 2, Partitions: 65535, Name: "u"},
		"topic with a bad name":     &TopicCreated{Topic: 2, Partitions: 1, Name: "a b"},
		"deleting an unknown topic": &TopicDeleted{Topic: 2},
		"group id used":             &GroupCreated{Group: 1, Topic: 1, Name: "h"},
		"group name used":           &GroupCreated{Group: 2, Topic: 1, Name: "g"},
		"group on no topic":         &GroupCreated{Group: 2, Topic: 2, Name: "g"},
		"deleting an unknown group": &GroupDeleted{Group: 2},
		"member of no group":        &MemberJoined{Group: 2, Member: 9, MembershipEpoch: 3},
		"member id used":            &MemberJoined{Group: 1, Member: 8, MembershipEpoch: 3},
		"membership epoch again":    &MemberJoined{Group: 1, Member: 9, MembershipEpoch: 2},
		"membership epoch gap":      &MemberJoined{Group: 1, Member: 9, MembershipEpoch: 4},
		"unknown member leaves":     &MemberLeft{Group: 1, Member: 9, MembershipEpoch: 3},
		"leaves under an old epoch": &MemberLeft{Group: 1, Member: 4, MembershipEpoch: 2},
		"assignment of no group":    &Assigned{Group: 2, MembershipEpoch: 2, AssignmentEpoch: 2, Parts: []AssignedPart{{0, 4, 4}}},
		"empty assignment":          &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 2},
		"old membership":            &Assigned{Group: 1, MembershipEpoch: 1, AssignmentEpoch: 2, Parts: []AssignedPart{{0, 4, 4}}},
		"assignment epoch back":     &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 0, Parts: []AssignedPart{{0, 4, 4}}},
		"assignment epoch gap":      &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 3, Parts: []AssignedPart{{0, 4, 4}}},
		"no such partition":         &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 2, Parts: []AssignedPart{{3, 4, 4}}},
		"partitions out of order":   &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 2, Parts: []AssignedPart{{1, 4, 4}, {0, 4, 5}}},
		"partition twice":           &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 2, Parts: []AssignedPart{{1, 4, 4}, {1, 4, 5}}},
		"not a member":              &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 2, Parts: []AssignedPart{{0, 5, 4}}},
		"ownership epoch again":     &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 1, Parts: []AssignedPart{{0, 4, 3}}},
		"one ownership epoch twice": &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 1, Parts: []AssignedPart{{0, 4, 4}, {1, 4, 4}}},
		"target in the old epoch":   &Assigned{Group: 1, MembershipEpoch: 2, AssignmentEpoch: 1, Parts: []AssignedPart{{0, 4, 0}}},
	} {
		s := base(t)
		before := s.AppendSnapshot(nil)
		if err := s.Apply(6, 1, m); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		if !bytes.Equal(before, s.AppendSnapshot(nil)) {
			t.Errorf("%s: refused, but the state changed", name)
		}
	}
}

func TestApply_DeletedTopicTakesItsGroupsAndKeepsItsID(t *testing.T) {
	s := base(t)
	if err := s.Apply(6, 1, &TopicDeleted{Topic: 1}); err != nil {
		t.Fatal(err)
	}
	if s.Topic(1) != nil || s.TopicByName("t") != nil || s.Group(1) != nil || s.GroupByName("g", 1) != nil || len(s.Groups()) != 0 || len(s.Topics()) != 0 {
		t.Fatal("something of the topic is left")
	}
	if !s.TopicDeleted(1) || s.TopicDeleted(2) || s.TopicDeleted(0) {
		t.Fatal("TopicDeleted tells deleted ids from unknown ones")
	}
	if err := s.Apply(7, 1, &TopicCreated{Topic: 1, Partitions: 1, Name: "t"}); !errors.Is(err, ErrInvalid) {
		t.Fatalf("a deleted topic's id was given again: %v", err)
	}
	if err := s.Apply(7, 1, &TopicCreated{Topic: 2, Partitions: 1, Name: "t"}); err != nil {
		t.Fatal(err)
	}
}

func TestApply_LeavingMemberFreesItsPartitions(t *testing.T) {
	s := base(t)
	if err := s.Apply(6, 1, &MemberLeft{Group: 1, Member: 4, MembershipEpoch: 3}); err != nil {
		t.Fatal(err)
	}
	want := []Part{{0, 1, 0}, {8, 2, 8}, {0, 3, 0}}
	if got := s.Group(1).Parts; !reflect.DeepEqual(got, want) {
		t.Fatalf("parts are %v, want %v", got, want)
	}
}

func TestChecks_AnswerWithTheirCodes(t *testing.T) {
	s := base(t)
	local := TopicSettings{Durability: protocol.DurabilityLocal}
	quorum := TopicSettings{}
	for name, c := range map[string]struct {
		err  error
		want error
	}{
		"new topic":           {s.CheckCreateTopic("new", 4, 0, 0), nil},
		"bad name":            {s.CheckCreateTopic("a..b", 4, 0, 0), protocol.CodeInvalidTopic},
		"reserved name":       {s.CheckCreateTopic("$dlq.g", 1, 0, 0), protocol.CodeInvalidTopic},
		"system topic":        {s.CheckCreateSystemTopic("$dlq.g", 1, 0, 0), nil},
		"existing topic":      {s.CheckCreateTopic("t", 3, 0, 0), protocol.CodeTopicExistsMismatch},
		"no partitions":       {s.CheckCreateTopic("new", 0, 0, 0), protocol.CodeQuotaExceeded},
		"too many partitions": {s.CheckCreateTopic("new", 65535, 0, 0), protocol.CodeQuotaExceeded},
		"ids used up":         {s.CheckCreateTopic("new", 1, MaxTopicID-1, 0), protocol.CodeQuotaExceeded},
		"all partitions":      {s.CheckCreateTopic("new", 1, 0, MaxPartitions), protocol.CodeQuotaExceeded},
		"same":                {s.Topic(1).CheckSameTopic(3, nil), nil},
		"same, count open":    {s.Topic(1).CheckSameTopic(0, &quorum), nil},
		"other count":         {s.Topic(1).CheckSameTopic(4, nil), protocol.CodeTopicExistsMismatch},
		"other settings":      {s.Topic(1).CheckSameTopic(3, &local), protocol.CodeTopicExistsMismatch},
		"new group":           {s.CheckCreateGroup("h", 1, 0, 0), nil},
		"group on no topic":   {s.CheckCreateGroup("h", 2, 0, 0), protocol.CodeUnknownTopic},
		"existing group":      {s.CheckCreateGroup("g", 1, 0, 0), protocol.CodeGroupExistsMismatch},
		"bad group":           {s.CheckCreateGroup("g g", 1, 0, 0), protocol.CodeMalformedPayload},
		"group ids used up":   {s.CheckCreateGroup("h", 1, MaxGroupID-1, 0), protocol.CodeQuotaExceeded},
		"too many cursors":    {s.CheckCreateGroup("h", 1, 0, MaxAssignments-5), protocol.CodeGroupAssignmentLimit},
		"just enough cursors": {s.CheckCreateGroup("h", 1, 0, MaxAssignments-6), nil},
		"other kind of group": {s.Group(1).CheckSetGroup(&GroupSettings{Broadcast: true}), protocol.CodeGroupExistsMismatch},
		"other strategy":      {s.Group(1).CheckSetGroup(&GroupSettings{Strategy: StrategyCircle}), nil},
		"same group":          {s.Group(1).CheckSameGroup(nil), nil},
		"other group setting": {s.Group(1).CheckSameGroup(&GroupSettings{MaxAttempts: 3}), protocol.CodeGroupExistsMismatch},
	} {
		if !errors.Is(c.err, c.want) || (c.want == nil) != (c.err == nil) {
			t.Errorf("%s: %v, want %v", name, c.err, c.want)
		}
	}
}

func TestSettings_RefuseWhatTheyDoNotKnow(t *testing.T) {
	for _, in := range []string{"", "null", "[]", "1", `{"durabilty":"local"}`, `{"Durability":"local"}`, `{"durability":"fast"}`, `{"durability":1}`, `{} {}`, `{"durability":"local"`} {
		if _, err := ParseTopicSettings([]byte(in)); !errors.Is(err, protocol.CodeInvalidTopic) {
			t.Errorf("topic settings %q: %v", in, err)
		}
	}
	for _, in := range []string{
		"", `{"max_attempts":0}`, `{"max_attempts":65536}`, `{"attempts":3}`, `{"strategy":"random"}`, `{"strategy":1}`, `{"ordered":1}`,
		`{"lease_ms":999}`, `{"lease_ms":43200001}`, `{"retry":"fast"}`, `{"retry":[]}`, `{"retry":[9]}`, `{"retry":[86400001]}`, `{"retry":[1.5]}`,
		`{"ordered":true,"retry":[30001]}`, `{"ordered":true,"retry":"rocketmq"}`, `{"broadcast":true,"ordered":true}`,
		`{"broadcast":true,"max_attempts":1}`, `{"broadcast":true,"retry":[10]}`, `{"broadcast":true,"strategy":"circle"}`,
		`{"retry":[` + strings.Repeat("10,", MaxRetryDelays) + `10]}`,
	} {
		if _, err := ParseGroupSettings([]byte(in)); !errors.Is(err, protocol.CodeGroupExistsMismatch) {
			t.Errorf("group settings %q: %v", in, err)
		}
	}
	s, err := ParseTopicSettings([]byte(` {"durability" : "memory"} `))
	if err != nil || s.Durability != protocol.DurabilityMemory {
		t.Errorf("%+v, %v", s, err)
	}
	g, err := ParseGroupSettings([]byte(`{"max_attempts":1}`))
	if err != nil || g.MaxAttempts != 1 {
		t.Errorf("%+v, %v", g, err)
	}
}

func TestGroupSettings_KeepTheirJSON(t *testing.T) {
	for in, want := range map[string]struct {
		json     string
		attempts int
		delays   int
	}{
		`{}`: {`{}`, 5, 0},
		`{"strategy":"sticky","retry":"exponential","broadcast":false}`: {`{}`, 5, 0},
		`{"strategy":"circle", "ordered":true}`:                         {`{"ordered":true,"strategy":"circle"}`, 0, 1},
		`{"ordered":true,"max_attempts":4}`:                             {`{"max_attempts":4,"ordered":true}`, 4, 1},
		`{"retry":"rocketmq"}`:                                          {`{"retry":"rocketmq"}`, 17, 16},
		`{"lease_ms":5000,"retry":[10, 1000]}`:                          {`{"lease_ms":5000,"retry":[10,1000]}`, 5, 2},
		`{"broadcast":true,"lease_ms":1000}`:                            {`{"broadcast":true,"lease_ms":1000}`, 1, 0},
	} {
		s, err := ParseGroupSettings([]byte(in))
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if got := string(s.AppendJSON(nil)); got != want.json || s.Attempts(5) != want.attempts || len(s.RetryDelays()) != want.delays {
			t.Errorf("%s: %s, %d attempts, %d delays", in, got, s.Attempts(5), len(s.RetryDelays()))
		}
		if again, err := ParseGroupSettings([]byte(want.json)); err != nil || !again.Equal(&s) {
			t.Errorf("%s does not come back: %+v, %v", want.json, again, err)
		}
	}
}
