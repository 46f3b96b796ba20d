package main

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func readLines(r io.Reader, limit int) (lines []string, err error) {
	l := newLineReader(r, limit)
	for {
		line, err := l.next()
		if errors.Is(err, io.EOF) {
			return lines, nil
		}
		if err != nil {
			return lines, err
		}
		lines = append(lines, string(line))
	}
}

func TestLineReader_KeepsEveryByteButTheNewline(t *testing.T) {
	long := strings.Repeat("x", 3*lineBuffer+7)
	for _, c := range []struct {
		name, input string
		want        []string
	}{
		{"nothing", "", nil},
		{"one line", "a\n", []string{"a"}},
		{"no newline at the end", "a\nb", []string{"a", "b"}},
		{"empty lines", "\n\na\n\n", []string{"", "", "a", ""}},
		{"carriage returns", "a\r\n\r\nb\r", []string{"a\r", "\r", "b\r"}},
		{"NUL and high bytes", "\x00\xff\n\x00\n", []string{"\x00\xff", "\x00"}},
		{"longer than the buffer", "a\n" + long + "\nb\n" + long, []string{"a", long, "b", long}},
		{"exactly the buffer", long[:lineBuffer] + "\n" + long[:lineBuffer-1] + "\nc", []string{long[:lineBuffer], long[:lineBuffer-1], "c"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(c.input), iotest.HalfReader(strings.NewReader(c.input)), iotest.DataErrReader(strings.NewReader(c.input))} {
				if got, err := readLines(r, len(long)); err != nil || !slices.Equal(got, c.want) {
					t.Errorf("%d lines, want %d; error %v", len(got), len(c.want), err)
				}
			}
		})
	}
}

func TestLineReader_LimitAndErrors(t *testing.T) {
	got, err := readLines(strings.NewReader("12345\n123456\n"), 5)
	if !errors.Is(err, errLineTooLong) || !strings.Contains(err.Error(), "line 2") || !slices.Equal(got, []string{"12345"}) {
		t.Errorf("lines %q, error %v", got, err)
	}
	long := strings.Repeat("x", 2*lineBuffer)
	if _, err := readLines(strings.NewReader(long+"\n"), len(long)-1); !errors.Is(err, errLineTooLong) {
		t.Errorf("error %v", err)
	}
	broken := errors.New("broken")
	if _, err := readLines(io.MultiReader(strings.NewReader("a\nb"), iotest.ErrReader(broken)), 5); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

func TestLineReader_AllocatesNothingPerLine(t *testing.T) {
	l := newLineReader(strings.NewReader(strings.Repeat("a line of text\n", 10_000)), 1000)
	if n := testing.AllocsPerRun(9_000, func() { _, _ = l.next() }); n != 0 {
		t.Errorf("%v allocations per line", n)
	}
}
