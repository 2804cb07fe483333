// What the files of the stand-in share.  See __init__.py for what it is.
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

#define API __attribute__((visibility("default")))  // all else stays within the library

// Of memory, see cuda.c.
int reserve_addresses(void **found, size_t bytes);  // 0: done
void release_addresses(void *start);
int take_bytes(size_t bytes);  // of the device; 0: done
void give_back_bytes(size_t bytes);
void forget_pages(void *start, size_t bytes);
void copy_bytes(void *to, const void *from, size_t bytes);

// Work for a stream: what a later wait for that stream is a wait for.
enum work { KERNEL = 'k', TO_HOST = 'h', TO_DEVICE = 'd', MESSAGE = 'm', RECORD = 'r', WAIT = 'w' };  // see replay.py
void give_work(char kind, void *stream, size_t bytes);
void count_kernel(void *stream);

#endif
