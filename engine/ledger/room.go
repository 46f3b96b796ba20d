package ledger

// DefaultMaxOpen is the number of messages that may be open in all cursors together, unless the host says otherwise.
const DefaultMaxOpen = 4 << 20

// openShare is how many messages a cursor may have open when there is no room: a group that holds on to all of it must not
// bring the others to a standstill.
const openShare = 16

// Room bounds the messages that are open in all the cursors of the books that share it, and with them the ledger's memory.
// When it is full a cursor gets a fresh message only while it has less than openShare open ones. It belongs to the
// goroutine of its books.
type Room struct {
	most, open int
	// waiting are the cursors that had a fresh message to offer and no room for it, the first one first; each is there once.
	waiting []*Cursor
}

// NewRoom makes room for a number of open messages; what recovery finds open beyond it stays.
func NewRoom(most int) *Room { return &Room{most: most} }

// Open is the number of messages that are open now.
func (r *Room) Open() int { return r.open }

func (r *Room) full() bool { return r.open >= r.most }

// wait has the cursor reported as ready when there is room.
func (r *Room) wait(c *Cursor) {
	if !c.waits {
		c.waits = true
		r.waiting = append(r.waiting, c)
	}
}

// wanted tells whether there is room that cursors wait for: more of them wait than could be offered it at once.
func (r *Room) wanted() bool { return len(r.waiting) > 0 && !r.full() }

// offer reports as many of the waiting cursors as there is room for.
func (r *Room) offer(fx *Effects) {
	if !r.wanted() {
		return
	}
	n := min(len(r.waiting), r.most-r.open)
	for _, c := range r.waiting[:n] {
		c.waits = false
		if !c.gone {
			fx.ready(c)
		}
	}
	clear(r.waiting[:n])
	if r.waiting = r.waiting[n:]; len(r.waiting) == 0 {
		r.waiting = nil
	}
}
