// SPDX-License-Identifier: Apache-2.0
//
// What the fake driver says of itself and its devices, and their contexts. A part of fake.c.
#ifndef FAKE_DEVICES_H
#define FAKE_DEVICES_H

DRIVER int cuDriverGetVersion(int* version) {
    BEGIN("cuDriverGetVersion");
    *version = 13000;
    END(0);
}

DRIVER int cuDeviceGetCount(int* count) {
    BEGIN("cuDeviceGetCount");
    *count = device_count;
    END(0);
}

DRIVER int cuDeviceGetName(char* name, int len, int device) {
    BEGIN("cuDeviceGetName");
    snprintf(name, (size_t)len, "Fake GPU %d", device);
    END(0);
}

DRIVER int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    BEGIN("cuDeviceTotalMem_v2");
    *bytes = (size_t)(device + 1) << 30;
    END(0);
}

DRIVER int cuDeviceGetAttribute(int* value, int attribute, int device) {
    BEGIN("cuDeviceGetAttribute");
    *value = is_foreign ? 1 : attribute == 75 ? 9 : device;
    END(0);
}

DRIVER int cuDeviceGet(int* device, int ordinal) {
    BEGIN("cuDeviceGet");
    *device = ordinal;
    END(ordinal < device_count ? 0 : invalid_device);
}

DRIVER int cuDevicePrimaryCtxRetain(void** context, int device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    contexts[device]++;
    *context = (void*)((uintptr_t)device + 1);
    END(0);
}

DRIVER int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN("cuDevicePrimaryCtxRelease_v2");
    if (--contexts[device] < 0)
        wrong("a context released too often");
    for (Range* range = ranges; !contexts[device] && range; range = range->next) {
        if (range->device == device && range->kind != device_memory)
            wrong("a context released before the host memory that it holds");
    }
    END(0);
}

#endif
