package coord

// readyList holds the readers of a consumer that may have something to deliver, the next one first. A reader is in at most
// one; it is taken out wherever it stands, since a member may lose any of its partitions.
type readyList struct {
	head, tail *reader
	n          int
}

func (l *readyList) push(rd *reader) {
	rd.listed, rd.prev, rd.next = true, l.tail, nil
	if l.tail == nil {
		l.head = rd
	} else {
		l.tail.next = rd
	}
	l.tail = rd
	l.n++
}

func (l *readyList) pop() *reader {
	rd := l.head
	l.remove(rd)
	return rd
}

func (l *readyList) remove(rd *reader) {
	if rd.prev == nil {
		l.head = rd.next
	} else {
		rd.prev.next = rd.next
	}
	if rd.next == nil {
		l.tail = rd.prev
	} else {
		rd.next.prev = rd.prev
	}
	rd.listed, rd.prev, rd.next = false, nil, nil
	l.n--
}

// shortHeap holds the readers of a consumer whose next messages are larger than its credit, the smallest first, so that
// neither a PULL nor a CREDIT has to try them all.
type shortHeap []*reader

func (h *shortHeap) push(rd *reader, need uint64) {
	rd.need = need
	*h = append(*h, rd)
	rd.short = len(*h)
	h.fix(rd.short - 1)
}

func (h *shortHeap) remove(rd *reader) {
	i, last := rd.short-1, len(*h)-1
	h.swap(i, last)
	(*h)[last] = nil
	*h = (*h)[:last]
	rd.short = 0
	h.fix(i)
}

func (h shortHeap) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].short, h[j].short = i+1, j+1
}

func (h shortHeap) fix(i int) {
	if i >= len(h) {
		return
	}
	for i > 0 && h[i].need < h[(i-1)/2].need {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for _, kid := range [2]int{2*i + 1, 2*i + 2} {
			if kid < len(h) && h[kid].need < h[least].need {
				least = kid
			}
		}
		if least == i {
			return
		}
		h.swap(i, least)
		i = least
	}
}

// ready puts a reader among those that may have something to deliver.
func (con *consumer) makeReady(rd *reader) {
	switch {
	case rd.listed:
		return
	case rd.short > 0:
		con.short.remove(rd) // its next message may be another one
	}
	con.ready.push(rd)
}

// unready takes a reader out of wherever it waits.
func (con *consumer) unready(rd *reader) {
	switch {
	case rd.listed:
		con.ready.remove(rd)
	case rd.short > 0:
		con.short.remove(rd)
	}
}

// credited makes those ready whose next messages the available credit is large enough for now.
func (con *consumer) credited() {
	for len(con.short) > 0 && con.short[0].need <= con.credit.bytes {
		rd := con.short[0]
		con.short.remove(rd)
		con.ready.push(rd)
	}
}
