package coord

import (
	"fmt"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// BenchmarkGroup_HeartbeatsOfManyGroups: a heartbeat costs the same however many groups there are.
func BenchmarkGroup_HeartbeatsOfManyGroups(b *testing.B) {
	for _, groups := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) {
			x, _ := withTopic(b, 4)
			x.deliver()
			beats := make([][]byte, groups)
			clients := make([]*stubClient, groups)
			for i := range groups {
				c := x.client()
				clients[i] = c
				x.do(c, sub(fmt.Sprint("g", i), 1))
				x.confirm(c)
				s := x.c.lookup(c).subs[0]
				beats[i] = heartbeat(s.id, s.member, s.membershipEpoch, s.assignmentEpoch, protocol.MemberActive)
			}
			x.records = nil
			for i := 0; b.Loop(); i++ {
				c := clients[i%groups]
				if got := c.answers[x.send(c, beats[i%groups])]; got != "OK HEARTBEAT" {
					b.Fatal(got)
				}
				clear(c.answers)
				c.order = c.order[:0]
			}
		})
	}
}

// BenchmarkGroup_OneOfManyComesAndGoes is a group that is created and deleted beside others: it costs what it has, whatever
// the others have.
func BenchmarkGroup_OneOfManyComesAndGoes(b *testing.B) {
	for _, size := range []struct{ groups, partitions int }{{1, 100}, {1000, 100}, {1, 1000}, {100, 1000}} {
		b.Run(fmt.Sprintf("groups=%d/partitions=%d", size.groups, size.partitions), func(b *testing.B) {
			x, c := withTopic(b, uint16(size.partitions))
			x.deliver()
			for i := range size.groups {
				x.do(c, declareGroup("t", fmt.Sprint("g", i), "", 0))
			}
			for b.Loop() {
				x.records, x.ledger = nil, nil
				x.do(c, declareGroup("t", "one", "", 0))
				x.do(c, declareGroup("t", "one", "", protocol.DeclareFlagDelete))
				clear(c.answers)
				c.order = c.order[:0]
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(size.partitions), "ns/partition")
		})
	}
}
