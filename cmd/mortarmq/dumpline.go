package main

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// fieldList is a line of dump: names and values in order.
type fieldList []namedValue

type namedValue struct {
	name  string
	value any
}

// with appends pairs of a name and a value.
func (l fieldList) with(pairs ...any) fieldList {
	for i := 0; i+1 < len(pairs); i += 2 {
		l = append(l, namedValue{pairs[i].(string), pairs[i+1]})
	}
	return l
}

// payload is a key or value, perhaps not all of it.
type payload struct {
	bytes   []byte
	clipped bool
}

func (p payload) String() string {
	s := strconv.Quote(string(p.bytes))
	if p.clipped {
		s += "..."
	}
	return s
}

// MarshalJSON makes a string of what is UTF-8 and an object with the base64 form of everything else.
func (p payload) MarshalJSON() ([]byte, error) {
	if utf8.Valid(p.bytes) {
		return json.Marshal(string(p.bytes))
	}
	return json.Marshal(map[string]string{"base64": base64.StdEncoding.EncodeToString(p.bytes)})
}

// writeText writes file, offset and type with tabs, and the rest as name=value.
func (l fieldList) writeText(w *bufio.Writer) error {
	for i, f := range l {
		var err error
		switch {
		case i == 0:
			_, err = fmt.Fprint(w, f.value)
		case i < 3:
			_, err = fmt.Fprintf(w, "\t%v", f.value)
		case i == 3:
			_, err = fmt.Fprintf(w, "\t%s=%s", f.name, textValue(f.value))
		default:
			_, err = fmt.Fprintf(w, " %s=%s", f.name, textValue(f.value))
		}
		if err != nil {
			return outputError(err)
		}
	}
	return w.WriteByte('\n')
}

// textValue quotes strings that would run into the next field.
func textValue(v any) string {
	s, ok := v.(string)
	if !ok {
		return fmt.Sprint(v)
	}
	for _, c := range s {
		if c <= ' ' || c == '"' || c == '=' || !strconv.IsPrint(c) {
			return strconv.Quote(s)
		}
	}
	if s == "" {
		return `""`
	}
	return s
}

func (l fieldList) writeJSON(w *bufio.Writer) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	for i, f := range l {
		sep := ","
		if i == 0 {
			sep = "{"
		}
		b.WriteString(sep)
		b.WriteString(strconv.Quote(f.name))
		b.WriteByte(':')
		if err := enc.Encode(f.value); err != nil {
			return err
		}
		b.Truncate(b.Len() - 1) // the newline that Encode adds
	}
	b.WriteString("}\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return outputError(err)
	}
	return nil
}
