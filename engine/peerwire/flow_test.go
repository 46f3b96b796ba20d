package peerwire

import (
	"errors"
	"testing"
	"time"
)

// drive sends pieces for a while to a receiver that acknowledges all of them at once, and returns the bytes sent.
func drive(t *testing.T, f *Flow, from, until time.Duration, piece int) (sent uint64) {
	t.Helper()
	for now := from; now < until; {
		room, wait := f.Room(now)
		switch {
		case room > 0:
			f.Sent(piece)
			sent += uint64(piece)
			if err := f.Acked(f.sent); err != nil {
				t.Fatal(err)
			}
		case wait <= 0:
			t.Fatalf("at %v nothing may be sent and nothing is waited for", now)
		default:
			now += wait
		}
	}
	return sent
}

func TestFlow_KeepsItsPaceWhateverThePieces(t *testing.T) {
	for _, piece := range []int{1 << 10, 64 << 10, 1 << 20, 17 << 20} {
		var f Flow
		sent := drive(t, &f, 0, 10*time.Second, piece)
		if want := uint64(10 * FlowMinRate); sent < want-want/20 || sent > want+want/20+uint64(piece) {
			t.Errorf("in pieces of %d bytes %d went out in ten seconds, not %d", piece, sent, want)
		}
	}
}

func TestFlow_SavesNothingUpWhileNobodyAsks(t *testing.T) {
	var f Flow
	room, _ := f.Room(time.Hour)
	if most := FlowMinRate / 50; room <= 0 || room > most {
		t.Errorf("after an hour %d bytes may be sent at once, not up to %d", room, most)
	}
}

func TestFlow_WindowWaitsForAcknowledgements(t *testing.T) {
	var f Flow
	now := time.Duration(0)
	for f.Unacknowledged() < FlowWindow {
		if room, wait := f.Room(now); room > 0 {
			f.Sent(1 << 20)
		} else {
			now += wait
		}
	}
	now += time.Minute
	if room, wait := f.Room(now); room != 0 || wait != 0 {
		t.Errorf("with the window full %d bytes may be sent, or some in %v", room, wait)
	}
	if err := f.Acked(1 << 20); err != nil {
		t.Fatal(err)
	}
	if room, _ := f.Room(now + time.Second); room <= 0 || room > 1<<20 {
		t.Errorf("one piece was acknowledged, and %d bytes may be sent", room)
	}
	if err := f.Acked(1); err != nil || f.Unacknowledged() != FlowWindow-1<<20 {
		t.Errorf("an older acknowledgement leaves %d bytes open, %v", f.Unacknowledged(), err)
	}
	if err := f.Acked(FlowWindow + 1); !errors.Is(err, ErrBody) {
		t.Errorf("what was never sent is acknowledged: %v", err)
	}
}

func TestFlow_PaceRisesUntilTheGapShrinks(t *testing.T) {
	var f Flow
	const published = 300 << 20 // bytes per second
	gap := uint64(10 << 30)
	var fastest uint64
	for second := range 600 {
		now := time.Duration(second) * time.Second
		f.Progress(now, gap, f.Rate() > published*5/4)
		fastest = max(fastest, f.Rate())
		sent := min(f.Rate(), gap+published)
		gap = gap + published - sent
		if gap == 0 {
			break
		}
		if f.Overwhelmed() {
			t.Fatal("publishers are slowed down although the follower can catch up")
		}
	}
	if gap != 0 || fastest > 2*published {
		t.Errorf("after ten minutes the gap is %d bytes, the pace was up to %d", gap, fastest)
	}
}

func TestFlow_OverwhelmedWhereNoPaceIsEnough(t *testing.T) {
	var f Flow
	gap := uint64(1 << 30)
	for second := range 60 {
		f.Progress(time.Duration(second)*time.Second, gap, true)
		gap += 1 << 20
	}
	if f.Rate() != FlowMaxRate || !f.Overwhelmed() {
		t.Errorf("the pace is %d, overwhelmed %v", f.Rate(), f.Overwhelmed())
	}
	f.Progress(100*time.Second, gap-2<<20, false)
	if f.Overwhelmed() {
		t.Error("overwhelmed although the gap shrinks")
	}
}

func TestFlow_PaceFallsWhereLiveTrafficSuffers(t *testing.T) {
	f := Flow{rate: FlowMaxRate}
	gap := uint64(1 << 40)
	for second := range 60 {
		f.Progress(time.Duration(second)*time.Second, gap, true)
		gap -= 1 << 20
	}
	if f.Rate() != FlowMinRate {
		t.Errorf("the pace is still %d", f.Rate())
	}
	f.Progress(59*time.Second+time.Millisecond, gap+2<<20, false)
	if f.Rate() != FlowMinRate {
		t.Error("the pace was changed before a period was over")
	}
	f.Progress(60*time.Second, gap-1<<20, false)
	if f.Rate() <= FlowMinRate {
		t.Error("the pace does not rise where nobody suffers")
	}
}
