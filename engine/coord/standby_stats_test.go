package coord

import (
	"reflect"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

// What a coordinator that stands by tells of a group is what the leader tells, as far as it is on record.
func TestStandbyStats_TellWhatTheLeaderTells(t *testing.T) {
	r := newRig(t, 2, nil)
	cl, _ := r.subscribe(rigGroup, true, func(s *subscription) { s.windowCount = 6 })
	r.publish(0, values(5)...)
	r.publish(1, values(5)...)
	ms := cl.want(6)
	r.commit()
	for i := range 3 {
		cl.ack(&ms[i], 0)
	}
	cl.nack(&ms[3], protocol.NackReject)
	r.turn()
	r.commit()
	picture := func(take func(*GroupStats)) GroupStats {
		g := GroupStats{ID: rigGroup, TopicID: rigTopic, Parts: make([]GroupPartitionStats, 2)}
		take(&g)
		return g
	}
	led, stoodBy := picture(r.d.groupStats), picture(r.d.standbyStats)
	if led.Acknowledged != 3 || led.Published != 10 || led.InFlight == 0 {
		t.Fatalf("%+v", led)
	}
	if !reflect.DeepEqual(led, stoodBy) {
		t.Errorf("leading:     %+v\nstanding by: %+v", led, stoodBy)
	}
	// Nobody tells the cursors of what comes while standing by.
	r.d.known(rigTopic, 0).last += 7
	late := picture(r.d.standbyStats)
	if late.Published != led.Published+7 || late.Waiting != led.Waiting+7 || late.Parts[0].Lag != led.Parts[0].Lag+7 {
		t.Errorf("with seven messages more: %+v, before: %+v", late, stoodBy)
	}
	if late.Published != late.Acknowledged+late.Dropped+late.InFlight+late.Waiting {
		t.Errorf("it does not add up: %+v", late)
	}
}
