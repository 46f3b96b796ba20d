package delivery

import (
	"syscall"
	"testing"
	"time"
)

// A broker that was stopped for longer than sessions and leases last, with the machine it runs on, say, has not heard its
// members: nobody is removed for that, and no attempt is used up.
func TestStoppedBroker_BlamesNobodyForItsAbsence(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes longer than a session")
	}
	d := start(t, t.TempDir())
	topic := declare(t, d, "t", 1)
	publish(t, d, topic, "1")
	m := join(t, d, "g", topic, `{"retry":[10],"lease_ms":10000}`)
	one := m.want(1, 1)
	if err := d.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(12 * time.Second)
	if err := d.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	m.mustAck(one)
	publish(t, d, topic, "2")
	two := m.want(2, 1)
	if two.OwnershipEpoch != one.OwnershipEpoch {
		t.Errorf("the partition's ownership epoch was %d and is %d", one.OwnershipEpoch, two.OwnershipEpoch)
	}
	m.mustAck(two)
}
