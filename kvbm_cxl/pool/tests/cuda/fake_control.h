// SPDX-License-Identifier: Apache-2.0
//
// What tests set and see of the fake driver. A part of fake.c.
#ifndef FAKE_CONTROL_H
#define FAKE_CONTROL_H

DRIVER void fake_set(const char* name, int value) {
    pthread_mutex_lock(&mutex);
    if (!strcmp(name, "devices"))
        device_count = value;
    else if (!strcmp(name, "queries_until_done"))
        queries_until_done = value;
    else if (!strcmp(name, "is_stuck"))
        is_stuck = value;
    else if (!strcmp(name, "copy_error"))
        copy_error = value;
    else if (!strcmp(name, "io_only"))
        io_only = value;
    else if (!strcmp(name, "register_us"))
        register_us = value;
    else if (!strcmp(name, "is_launch_lost"))
        is_launch_lost = value;
    else if (!strcmp(name, "bytes_per_us"))
        bytes_per_us = (uint64_t)value;
    else
        abort();
    pthread_mutex_unlock(&mutex);
}

DRIVER long fake_get(const char* name) {
    long found = 0;
    pthread_mutex_lock(&mutex);
    if (!strcmp(name, "copies"))
        found = copies;
    else if (!strcmp(name, "pins"))
        found = pins;
    else if (!strcmp(name, "failures"))
        for (int index = 0; index < max_names; index++)
            found += failures[index].times;
    else if (!strcmp(name, "io_registered"))
        found = io_registered;
    else if (!strcmp(name, "registrations"))
        found = registrations;
    else if (!strcmp(name, "most_registering"))
        found = most_registering;
    else if (!strcmp(name, "launches"))
        found = launches;
    else if (!strcmp(name, "modules"))
        found = modules;
    else if (!strcmp(name, "contexts"))
        for (int index = 0; index < max_devices; index++)
            found += contexts[index];
    else if (!strcmp(name, "streams"))
        for (Stream* stream = streams; stream; stream = stream->next)
            found++;
    else if (!strcmp(name, "events"))
        for (Event* event = events; event; event = event->next)
            found++;
    else if (!strcmp(name, "registered") || !strcmp(name, "pinned") || !strcmp(name, "allocated"))
        for (Range* range = ranges; range; range = range->next)
            found += range->kind == (!strcmp(name, "pinned") ? pinned : !strcmp(name, "registered") ? registered : device_memory);
    else
        abort();
    pthread_mutex_unlock(&mutex);
    return found;
}

// Calls of this name fail with `error`: `times` of them, after so many that succeed.
DRIVER void fake_fail(const char* call, int after, int times, int error) {
    pthread_mutex_lock(&mutex);
    for (int index = 0; index < max_names; index++) {
        if (failures[index].times)
            continue;
        snprintf(failures[index].name, sizeof failures[index].name, "%s", call);
        failures[index].after = after;
        failures[index].times = times;
        failures[index].error = error;
        break;
    }
    pthread_mutex_unlock(&mutex);
}

DRIVER void fake_forgive(void) {
    pthread_mutex_lock(&mutex);
    memset(failures, 0, sizeof failures);
    pthread_mutex_unlock(&mutex);
}

DRIVER const char* fake_misuse(void) {
    return misuse;
}

DRIVER void fake_hook(void (*called)(uint64_t, uint64_t, size_t, uint64_t, uint64_t)) {
    hook = called;
}

// A stream that does nothing until it is let go.
DRIVER void fake_hold(void* handle, int is_held) {
    pthread_mutex_lock(&mutex);
    stream_of(handle)->is_held = is_held;
    pthread_mutex_unlock(&mutex);
}

// The stream that was made last.
DRIVER void* fake_newest_stream(void) {
    return streams;
}

DRIVER void fake_finish(void) {
    pthread_mutex_lock(&mutex);
    for (Stream* stream = streams; stream; stream = stream->next)
        advance(stream, stream->given);
    pthread_mutex_unlock(&mutex);
}

// Work of the caller's: writes bytes to memory of the device. Null is the default stream of device 0.
DRIVER void fake_kernel(void* handle, uint64_t to, const void* bytes, size_t len) {
    void* copy = malloc(len);
    memcpy(copy, bytes, len);
    pthread_mutex_lock(&mutex);
    append(handle ? stream_of(handle) : &default_streams[0], (Op){.kind = op_kernel, .to = to, .len = len, .bytes = copy});
    pthread_mutex_unlock(&mutex);
}

#endif
