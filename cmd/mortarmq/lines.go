package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
)

// lineReader splits a stream at newlines and at nothing else. The last line needs none; empty lines are lines.
type lineReader struct {
	r     *bufio.Reader
	long  []byte // a line that didn't fit r's buffer
	limit int
	// number is the line that next returned last, from 1.
	number uint64
}

const lineBuffer = 1 << 20

// newLineReader reads lines of at most limit bytes.
func newLineReader(r io.Reader, limit int) *lineReader {
	return &lineReader{r: bufio.NewReaderSize(r, lineBuffer), limit: limit}
}

// errLineTooLong means that the line after the last one is longer than the limit.
var errLineTooLong = errors.New("the line is too long")

// next returns the next line without its newline, valid until the next call, and io.EOF behind the last one.
func (l *lineReader) next() ([]byte, error) {
	l.long = l.long[:0]
	for {
		part, err := l.r.ReadSlice('\n')
		switch {
		case err == nil:
			part = part[:len(part)-1]
		case errors.Is(err, io.EOF):
			if len(part) == 0 && len(l.long) == 0 {
				return nil, io.EOF
			}
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
		if len(l.long)+len(part) > l.limit {
			return nil, fmt.Errorf("line %d: %w: at most %d bytes are possible", l.number+1, errLineTooLong, l.limit)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			l.long = append(l.long, part...)
			continue
		case len(l.long) > 0:
			l.long = append(l.long, part...)
			part = l.long
		}
		l.number++
		return part, nil
	}
}
