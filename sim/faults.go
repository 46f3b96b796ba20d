package sim

import (
	"syscall"
	"time"

	"github.com/mortarmq/mortarmq/ring"
	"github.com/mortarmq/mortarmq/wal/simdisk"
)

// faultKind is something that goes wrong in the first phase.
type faultKind struct {
	name   string
	weight int
	// do lets it happen to a host; false where it can't at the moment.
	do func(s *scenario, h *host) bool
}

// faultKinds are all of them. Those that damage what a disk holds hit the run's victim only: data survives whatever happens
// to a minority.
var faultKinds = []faultKind{
	{"kill", 3, (*scenario).killed},
	{"power cut", 3, (*scenario).powerCut},
	{"power cut everywhere", 1, (*scenario).powerCutEverywhere},
	{"orderly stop", 1, (*scenario).orderlyStop},
	{"rolling restart", 1, (*scenario).rollingRestart},
	{"pause", 2, (*scenario).pause},
	{"partition", 2, (*scenario).partition},
	{"one-way partition", 2, (*scenario).oneWayPartition},
	{"connection reset", 1, (*scenario).connectionReset},
	{"message loss", 1, (*scenario).messageLoss},
	{"slow network", 1, (*scenario).slowNetwork},
	{"clock step", 1, (*scenario).clockStep},
	{"slow disk", 1, (*scenario).slowDisk},
	{"hanging disk", 2, (*scenario).hangingDisk},
	{"failed flush", 1, (*scenario).failedFlush},
	{"full disk", 1, (*scenario).fullDisk},
	{"bit flip", 2, (*scenario).bitFlip},
	{"misdirected read", 2, (*scenario).misdirectedRead},
	{"stale read", 2, (*scenario).staleRead},
	{"wiped disk", 1, (*scenario).wipedDisk},
}

// fault lets something go wrong, and comes again.
func (s *scenario) fault() {
	if s.quiet {
		return
	}
	w := s.w
	defer w.after(w.between(50*time.Millisecond, 1200*time.Millisecond), s.fault)
	total := 0
	for _, k := range faultKinds {
		total += k.weight
	}
	at := w.rng.IntN(total)
	h := w.hosts[w.rng.IntN(len(w.hosts))]
	for _, k := range faultKinds {
		if at -= k.weight; at < 0 {
			if k.do(s, h) {
				w.count(k.name)
			}
			return
		}
	}
}

// allUp tells whether every node runs.
func (s *scenario) allUp() bool {
	for _, h := range s.w.hosts {
		if h.node == nil {
			return false
		}
	}
	return true
}

func (s *scenario) killed(h *host) bool { return s.down(h, (*host).kill) }

func (s *scenario) powerCut(h *host) bool { return s.down(h, (*host).cutPower) }

func (s *scenario) orderlyStop(h *host) bool { return s.down(h, (*host).stop) }

// down ends a process, which is started again after a while.
func (s *scenario) down(h *host, end func(*host)) bool {
	if h.node == nil {
		return false
	}
	end(h)
	s.later(h)
	return true
}

func (s *scenario) powerCutEverywhere(*host) bool {
	if !s.allUp() {
		return false
	}
	for _, o := range s.w.hosts {
		o.cutPower()
		s.later(o)
	}
	return true
}

// rollingRestart stops one node after the other in order, each once the one before is back.
func (s *scenario) rollingRestart(*host) bool {
	if !s.allUp() {
		return false
	}
	at := time.Duration(0)
	for _, h := range s.w.hosts {
		s.w.after(at, func() {
			h.stop()
			s.w.after(s.w.between(50*time.Millisecond, 300*time.Millisecond), h.start)
		})
		at += s.w.between(400*time.Millisecond, time.Second)
	}
	return true
}

func (s *scenario) pause(h *host) bool {
	if h.node == nil || h.paused {
		return false
	}
	w := s.w
	w.note("node %d is stopped for a while", h.id)
	h.paused = true
	life := h.life
	w.after(w.between(50*time.Millisecond, 4*time.Second), func() {
		if h.life == life {
			w.note("node %d goes on", h.id)
			h.paused = false
			h.wake()
		}
	})
	return true
}

func (s *scenario) partition(h *host) bool {
	w := s.w
	w.note("node %d is cut off", h.id)
	for _, o := range w.hosts {
		if o != h {
			w.net.block(h.id, o.id)
			w.net.block(o.id, h.id)
		}
	}
	s.healLater()
	return true
}

func (s *scenario) oneWayPartition(h *host) bool {
	w := s.w
	n := w.rng.IntN(3)
	hit := false
	for i, o := range w.hosts {
		// One other node, or both.
		if o == h || n < 2 && i%2 != n {
			continue
		}
		w.note("node %d doesn't reach node %d", h.id, o.id)
		w.net.block(h.id, o.id)
		hit = true
	}
	if hit {
		s.healLater()
	}
	return hit
}

func (s *scenario) connectionReset(h *host) bool {
	w := s.w
	o := w.hosts[w.rng.IntN(3)]
	if o == h {
		return false
	}
	w.net.hangUp(h.id, o.id)
	w.after(w.between(time.Millisecond, 200*time.Millisecond), w.net.connectAll)
	return true
}

func (s *scenario) messageLoss(*host) bool {
	s.w.net.loss = []float64{0, 0.02, 0.2, 0.5}[s.w.rng.IntN(4)]
	return true
}

// slowNetwork has everything take long for a while.
func (s *scenario) slowNetwork(*host) bool {
	w := s.w
	w.net.jitter = w.between(time.Millisecond, 80*time.Millisecond)
	w.note("the network takes up to %v", w.net.jitter)
	w.after(w.between(500*time.Millisecond, 2*time.Second), func() { w.net.jitter = usualJitter })
	return true
}

func (s *scenario) clockStep(h *host) bool {
	h.skew += s.w.between(-time.Hour, time.Hour)
	s.w.note("the wall clock of node %d is off by %v", h.id, h.skew)
	return true
}

func (s *scenario) slowDisk(h *host) bool {
	s.w.note("the disk of node %d is slow", h.id)
	h.slow = 20
	s.w.after(s.w.between(time.Second, 3*time.Second), func() { h.slow = 1 })
	return true
}

func (s *scenario) hangingDisk(h *host) bool {
	w := s.w
	w.note("the disk of node %d hangs", h.id)
	free := h.disk.Inject(simdisk.Fault{Kind: ring.WriteSync, Count: 1 + w.rng.IntN(2), Hang: true})
	h.hangs = append(h.hangs, free)
	w.after(w.between(100*time.Millisecond, 4*time.Second), func() {
		free()
		h.wake()
	})
	return true
}

func (s *scenario) failedFlush(h *host) bool {
	w := s.w
	if !s.allUp() {
		return false
	}
	w.note("a flush of node %d fails", h.id)
	kind := ring.WriteSync
	if w.chance(0.3) {
		kind = ring.Sync
	}
	h.disk.Inject(simdisk.Fault{Kind: kind, Count: 1, Err: syscall.EIO})
	end := (*host).kill
	if w.chance(0.5) {
		end = (*host).cutPower
	}
	w.after(w.between(500*time.Millisecond, 2*time.Second), func() { s.down(h, end) })
	return true
}

// fullDisk lets a disk have no more room for a while.
func (s *scenario) fullDisk(h *host) bool {
	w := s.w
	room := int64(w.rng.IntN(256 << 10))
	w.note("the disk of node %d has %d more bytes", h.id, room)
	h.full(h.disk.Used() + room)
	w.after(w.between(500*time.Millisecond, 3*time.Second), func() {
		w.note("the disk of node %d has room again", h.id)
		h.full(0)
	})
	return true
}

// bitFlip damages a file at rest.
func (s *scenario) bitFlip(*host) bool {
	h := s.victim
	if h == nil {
		return false
	}
	p, off, ok := h.disk.Rot(s.w.rng, func(string) bool { return true })
	if ok {
		s.w.note("a bit of node %d's disk flips: %s at %d", h.id, p, off)
	}
	return ok
}

func (s *scenario) misdirectedRead(*host) bool {
	return s.badRead(simdisk.Fault{Kind: ring.Read, Misdirect: int64(1+s.w.rng.IntN(8)) * ring.BlockSize}, "another block's content")
}

func (s *scenario) staleRead(*host) bool {
	if s.victim == nil {
		return false
	}
	old, which := s.victim.disk.Clone(), s.victim.disks
	s.w.after(s.w.between(100*time.Millisecond, 2*time.Second), func() {
		if !s.quiet && s.victim.disks == which { // no disk returns what another one has held
			s.badRead(simdisk.Fault{Kind: ring.Read, Stale: old}, "older content")
		}
	})
	return true
}

// badRead has reads of the victim return something else: one of those of a running process, or of its next start.
func (s *scenario) badRead(f simdisk.Fault, what string) bool {
	h, w := s.victim, s.w
	if h == nil {
		return false
	}
	f.Count = 1
	f.Skip = w.rng.IntN(4)
	if w.chance(0.5) {
		w.note("a read of node %d gets %s", h.id, what)
		h.disk.Inject(f)
		return true
	}
	h.kill()
	which := h.disks
	f.Skip = w.rng.IntN(40)
	w.after(w.between(50*time.Millisecond, time.Second), func() {
		if h.node == nil && !s.quiet && h.disks == which {
			w.note("a read of node %d gets %s", h.id, what)
			h.disk.Inject(f)
		}
		h.start()
	})
	return true
}

// wipedDisk has the victim come back with an empty disk.
func (s *scenario) wipedDisk(*host) bool {
	h := s.victim
	if h == nil {
		return false
	}
	h.wipe()
	s.later(h)
	return true
}

// later starts a host again.
func (s *scenario) later(h *host) {
	s.w.after(s.w.between(50*time.Millisecond, 3*time.Second), h.start)
}

func (s *scenario) healLater() {
	s.w.after(s.w.between(200*time.Millisecond, 4*time.Second), func() {
		s.w.note("the network is whole again")
		s.w.net.heal()
	})
}
