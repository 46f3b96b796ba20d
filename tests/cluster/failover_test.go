package cluster

import "testing"

// The leader is killed under pipelined load: nothing that was acknowledged is lost or doubled, and the group goes on with what it
// has.
func TestKilledLeader_NothingIsLostAndNoPartitionMoves(t *testing.T) {
	f := Failover{Binary: mortard, Dir: t.TempDir(), Config: small, Rounds: 3, Load: DefaultLoad, Logf: t.Logf}
	if testing.Short() {
		f.Rounds = 1
	}
	report, err := f.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", *report)
}
