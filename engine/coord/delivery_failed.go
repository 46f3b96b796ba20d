package coord

import (
	"fmt"
	"math"

	"github.com/mortarmq/mortarmq/protocol"
)

// failed implements deliverer. Messages are still delivered as far as they are committed, so that consumers are not
// worse off than they must be; nothing about them is put on record any more, so none of them comes a second time.
func (d *delivery) failed(code protocol.ErrorCode, text string) {
	for _, l := range d.ledgers {
		l.held, l.again = true, math.MaxInt64 // the next record is never due
		l.gathered = 0
		for l.answers.len() > 0 {
			a := l.answers.pop()
			d.c.answerErr(a.client, a.req, a.op, code, text)
		}
		for l.proposed.len() > 0 {
			l.proposed.pop()
		}
	}
	resets := d.resets
	d.resets = nil
	for _, rs := range resets {
		rs.done(nil, fmt.Errorf("%s: %w", text, code))
	}
	if d.office.open == 0 {
		return
	}
	for _, g := range d.groups {
		for rd := range g.readers() {
			for _, l := range rd.letters {
				d.answerLetter(l, code, text)
			}
		}
	}
}
