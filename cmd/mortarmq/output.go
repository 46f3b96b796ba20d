package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"syscall"
)

// printRows prints structs: one line each with the fields in order and tabs between them, or a JSON array of objects. The
// order of the fields, and their json names, are a contract. Fields with the tag column:"-", the last ones, are in the JSON
// form only.
func printRows[T any](a *app, rows []T) error {
	if a.json {
		if rows == nil {
			rows = []T{} // [], not null
		}
		return a.printJSON(rows)
	}
	var b bytes.Buffer
	for _, r := range rows {
		appendRow(&b, reflect.ValueOf(r))
	}
	return a.write(b.Bytes())
}

// printRow prints one struct: a line, or a JSON object.
func printRow[T any](a *app, row T) error {
	if a.json {
		return a.printJSON(row)
	}
	var b bytes.Buffer
	appendRow(&b, reflect.ValueOf(row))
	return a.write(b.Bytes())
}

func appendRow(b *bytes.Buffer, v reflect.Value) {
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("column") == "-" {
			continue
		}
		if i > 0 {
			b.WriteByte('\t')
		}
		fmt.Fprint(b, v.Field(i).Interface())
	}
	b.WriteByte('\n')
}

func (a *app) printJSON(v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	return a.write(b.Bytes())
}

func (a *app) write(b []byte) error {
	_, err := a.stdout.Write(b)
	return outputError(err)
}

// errReaderGone means that whoever read the output has seen enough, and knows: nothing is said about it.
var errReaderGone = errors.New("nobody reads it any more")

// outputError is what a failed write of the output means; nil if err is.
func outputError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPIPE):
		err = errReaderGone
	}
	return fmt.Errorf("writing the output: %w", err)
}

// note tells the user something that is no result.
func (a *app) note(format string, args ...any) {
	fmt.Fprintf(a.stderr, "mortarmq: "+format+"\n", args...)
}

// decimal is a number with so many digits behind the point, in either form of output.
func decimal(v float64, digits int) json.Number {
	return json.Number(strconv.FormatFloat(v, 'f', digits, 64))
}
