package coord

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mortarmq/mortarmq/engine/ledger"
	"github.com/mortarmq/mortarmq/engine/metadata"
	"github.com/mortarmq/mortarmq/engine/mpsc"
	"github.com/mortarmq/mortarmq/wal"
)

// Options configures a Coordinator. Zero values stand for the defaults in parentheses.
type Options struct {
	// NodeID is recorded in the leader-change mutation of each start.
	NodeID uint16
	// PartitionDefaultCount is the partition count of a DECLARE that leaves it open (4).
	PartitionDefaultCount int
	// MaxMembers is the most members of a group (the specification's max(10, partition count)).
	MaxMembers int
	// DeliveryMaxAttempts is how many counted attempts a message gets (5).
	DeliveryMaxAttempts int
	// DeliveryLease is how long a delivery may stay unacknowledged (30 s).
	DeliveryLease time.Duration
	// MaxOpen is how many messages may be in flight or wait for another attempt, over all groups and partitions (4 Mi); see
	// ledger.Room.
	MaxOpen int
	// PollMaxWait bounds wait_ms of PULL (5 s).
	PollMaxWait time.Duration
	// CreditInitialCount is the window of a SUB that names none (256 messages); its bytes keep the ratio of 256 messages
	// to 2 MiB.
	CreditInitialCount int
	// MetadataSnapshotRecords (8192) and MetadataSnapshotBytes (64 MiB) bound the metadata log behind its snapshot.
	MetadataSnapshotRecords int
	MetadataSnapshotBytes   int64
	// TailBytes is how much of the recently committed rounds delivery may keep in memory once they are written (64 MiB).
	TailBytes int64
	// Standby has Run stand by: another node leads, see Lead.
	Standby bool
	// Seed feeds the jitter of retries; 0 takes one from the clock.
	Seed uint64
	// Now is the monotonic time (since New) and WallMs the wall clock in Unix milliseconds (the machine's).
	Now    func() time.Duration
	WallMs func() uint64
	// Sleeper is what Run's goroutine sleeps on; nil means a channel. Its owner closes it after Run.
	Sleeper Sleeper
	// Logger receives what an operator should know (nothing is logged).
	Logger *slog.Logger
}

func (o *Options) setDefaults() {
	setDefault(&o.PartitionDefaultCount, 4)
	setDefault(&o.DeliveryMaxAttempts, 5)
	setDefault(&o.DeliveryLease, 30*time.Second)
	setDefault(&o.MaxOpen, ledger.DefaultMaxOpen)
	setDefault(&o.PollMaxWait, 5*time.Second)
	setDefault(&o.CreditInitialCount, 256)
	setDefault(&o.MetadataSnapshotRecords, 8192)
	setDefault(&o.MetadataSnapshotBytes, 64<<20)
	setDefault(&o.TailBytes, 64<<20)
	if o.Sleeper == nil {
		o.Sleeper = make(channelSleeper, 1)
	}
	if o.Now == nil {
		start := time.Now()
		o.Now = func() time.Duration { return time.Since(start) }
	}
	if o.WallMs == nil {
		o.WallMs = func() uint64 { return uint64(time.Now().UnixMilli()) }
	}
	setDefault(&o.Seed, o.WallMs())
	if o.Logger == nil {
		o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
}

func setDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Coordinator owns the metadata, the groups and the delivery of messages. Create it with New, recover it (Restore*,
// Replay*, SetBounds, Epoch, Recovered), then Run it, or step it: Begin, Turn as often as there is something to do, End. The inputs (Submit, CommitRound, Closed and so on) may be called
// from any goroutine; everything unexported belongs to Run's.
type Coordinator struct {
	opts      Options
	log       Log
	store     Store
	placement Placement
	journals  int
	logger    *slog.Logger

	registry atomic.Pointer[Registry]
	// watching: there are subscriptions, so new messages matter at once.
	watching atomic.Bool

	inbox *mpsc.Queue[event]
	// driving is held by whoever runs a turn: Run's goroutine, which lets go of it while it sleeps, or who lends it a thread.
	// It guards everything below but the two counters.
	driving sync.Mutex
	// lendable: Run's goroutine sleeps, until wakeAt unless it is woken.
	lendable bool
	wakeAt   time.Duration
	// proposed: something was proposed since the journals were last told.
	proposed bool

	spare []event
	// sleeper is what Run's goroutine sleeps on.
	sleeper Sleeper
	// queuedRequests and queuedBytes count what waits in the inbox, see Submit.
	queuedRequests atomic.Int64
	queuedBytes    atomic.Int64

	// real, now and wallMs are set at the start of each turn of the loop. now is the clock of leases, sessions and retries:
	// real less the time for which it was frozen, see Freeze, or the process did not run.
	real, now time.Duration
	// resting says that Run has the next turn follow within maxRest.
	resting bool
	wallMs  uint64
	// frozen is why nothing can be committed for the time being; empty: it can.
	frozen string
	epoch  wal.Epoch

	delivery deliverer
	// stopping: a connection that ends now does so because the broker does.
	stopping atomic.Bool

	meta      *metadata.State
	proposals proposals
	// metaRecords and metaBytes count what the metadata log holds above its last snapshot.
	metaRecords int
	metaBytes   int64
	// quarantined, readOnly and logFailed say why metadata can't be served or changed; empty: it can.
	quarantined string
	readOnly    string
	logFailed   string
	// standby: another node leads; standbyErr is why this one can't. deposed: it led once.
	standby, deposed bool
	// silenced are the journals of which nothing is folded or written down any more.
	silenced   []bool
	standbyErr error

	topics topicChanges
	groups groupHosts

	sessions    map[uint64]*session
	lastSession *session
	byHandle    map[uint64]*subscription // live subscriptions and those that wait to become it
	lastHandle  uint64
	refs        map[uint64]pendingRequest // requests that a group machine will answer
	lastRef     uint64
	dirty       []*session
	frame       []byte // scratch for one answer
}

// New returns a coordinator for a broker with the given number of journals, before recovery.
func New(opts Options, log Log, store Store, place Placement, journals int) *Coordinator {
	opts.setDefaults()
	c := &Coordinator{
		opts: opts, log: log, store: store, placement: place, journals: journals, logger: opts.Logger, silenced: make([]bool, journals),
		sleeper:  opts.Sleeper,
		standby:  opts.Standby,
		meta:     metadata.NewState(),
		topics:   newTopicChanges(),
		groups:   newGroupHosts(),
		sessions: make(map[uint64]*session),
		byHandle: make(map[uint64]*subscription),
		refs:     make(map[uint64]pendingRequest),
	}
	c.inbox = mpsc.New[event](c.sleeper.Wake)
	c.registry.Store(&Registry{})
	c.delivery = newDelivery(c, deliveryDeps{
		meta:      func() *metadata.State { return c.meta },
		epoch:     func() wal.Epoch { return c.epoch },
		readDone:  c.ReadDone,
		tailBytes: opts.TailBytes,

		ensureTopic: c.ensureSystemTopic,
	})
	return c
}

// Registry returns the present picture of the topics. Any goroutine may call it.
func (c *Coordinator) Registry() *Registry { return c.registry.Load() }

// Sleeper is how the coordinator's goroutine waits, see ring.Sleeper.
type Sleeper interface {
	// Wake ends the present or the next Sleep. Any goroutine.
	Wake()
	// Sleep waits for Wake, or for timeout; negative: for ever. It may return early.
	Sleep(timeout time.Duration)
}

// Run serves until ctx is done; it is the coordinator's goroutine. What is queued then is handled once more; what comes
// later is refused. It returns nil then, and an error only where the coordinator can't go on.
func (c *Coordinator) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, c.sleeper.Wake)()
	c.driving.Lock()
	defer c.driving.Unlock()
	c.Begin()
	for {
		next, due := c.turn()
		c.resting = due
		c.tellJournals()
		if ctx.Err() != nil {
			c.End()
			return nil
		}
		if due && next <= c.now || !c.inbox.Sleep() {
			continue
		}
		timeout := time.Duration(-1)
		c.wakeAt = wal.Never
		if due {
			timeout = min(max(next-c.now-(c.opts.Now()-c.real), 0), maxRest)
			c.wakeAt = next
		}
		c.lendable = true
		c.driving.Unlock()
		c.sleeper.Sleep(timeout)
		c.driving.Lock()
		c.lendable = false
		c.inbox.Awake()
	}
}

// Lend runs a turn on the caller's thread if Run's goroutine sleeps: waking it takes longer than what a few requests or a
// small round take to handle. The journals are not told of what is proposed, that is left to the caller. If the goroutine
// is awake Lend does nothing, and what is queued is handled there. Any goroutine.
func (c *Coordinator) Lend() {
	if !c.driving.TryLock() {
		c.inbox.Nudge()
		return
	}
	if !c.lendable {
		c.driving.Unlock()
		c.inbox.Nudge()
		return
	}
	next, due := c.turn()
	c.proposed = false
	early := due && next < c.wakeAt
	c.driving.Unlock()
	if early {
		c.inbox.Rouse() // to sleep less long
		return
	}
	c.inbox.Nudge() // for what was queued quietly meanwhile
}

// tellJournals wakes the journals for what was proposed.
func (c *Coordinator) tellJournals() {
	if c.proposed {
		c.proposed = false
		c.log.Flush()
	}
}

// End handles what is queued once more and refuses what comes later. It comes after the last Turn.
func (c *Coordinator) End() {
	c.inbox.Close()
	c.turn()
	c.tellJournals()
	if d, ok := c.delivery.(*delivery); ok {
		d.close()
	}
}

// Turn handles everything that is queued and due, and returns after how long something will be due next; negative: nothing
// will.
func (c *Coordinator) Turn() (next time.Duration) {
	at, due := c.turn()
	c.tellJournals()
	if !due || at == wal.Never {
		return -1
	}
	return max(at-c.now, 0)
}

// Queued reports whether something waits for the next turn.
func (c *Coordinator) Queued() bool { return !c.inbox.Empty() }

// Begin comes before the first turn.
func (c *Coordinator) Begin() {
	c.readClocks()
	if c.standby {
		c.publishRegistry()
		return
	}
	c.proposeLeader()
}

// Bounds of the time between two turns.
const (
	// maxRest is how long Run sleeps while something is due later.
	maxRest = time.Second
	// maxLate is how much longer it may take. Beyond that the process did not run: it, or the whole machine, was stopped.
	maxLate = time.Second
)

// readClocks sets what a turn takes for the time. Time for which the process did not run is left out of the clock of leases,
// sessions and retries: what members have sent meanwhile is still to be read.
func (c *Coordinator) readClocks() {
	real := c.opts.Now()
	step := real - c.real
	if c.resting && step > maxRest+maxLate {
		c.logger.Warn("the process did not run for a while: leases, sessions and retries have waited for it", "time", step-maxRest)
		step = maxRest
	}
	if c.frozen == "" {
		c.now += step
	}
	c.real, c.wallMs = real, c.opts.WallMs()
}

// turn handles everything that is queued and due, and returns when something will be due next (false: nothing will).
func (c *Coordinator) turn() (next time.Duration, due bool) {
	c.readClocks()
	events := c.inbox.Drain(c.spare)
	for i := range events {
		c.handle(&events[i])
	}
	c.spare = events
	if c.standby || c.deposed {
		c.delivery.compact()
		c.flush()
		return 0, false
	}
	next, due = c.tickGroups()
	if at := c.delivery.tick(c.now); at != 0 && (!due || at < next) {
		next, due = at, true
	}
	if c.frozen != "" {
		next, due = c.delivery.dueFrozen()
	}
	c.flush()
	c.watching.Store(len(c.byHandle) > 0)
	return next, due
}

// flush hands the frames of this turn to the sockets, once per connection.
func (c *Coordinator) flush() {
	for i, ss := range c.dirty {
		ss.dirty = false
		ss.client.Flush()
		c.dirty[i] = nil
	}
	c.dirty = c.dirty[:0]
}

// channelSleeper is the Sleeper of tests and of who turns the coordinator himself.
type channelSleeper chan struct{}

func (s channelSleeper) Wake() {
	select {
	case s <- struct{}{}:
	default:
	}
}

func (s channelSleeper) Sleep(timeout time.Duration) {
	var expired <-chan time.Time
	if timeout >= 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-s:
	case <-expired:
	}
}
