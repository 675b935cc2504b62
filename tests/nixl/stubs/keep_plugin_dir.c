/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before NIXL's gtests: a test that sets NIXL_PLUGIN_DIR to its build's own folder keeps the folder that the runner has set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

static int is_kept(const char* name) {
    return name && strcmp(name, "NIXL_PLUGIN_DIR") == 0;
}

int setenv(const char* name, const char* value, int overwrite) {
    int (*next)(const char*, const char*, int) = (int (*)(const char*, const char*, int))dlsym(RTLD_NEXT, "setenv");
    return is_kept(name) ? 0 : next(name, value, overwrite);
}

int unsetenv(const char* name) {
    int (*next)(const char*) = (int (*)(const char*))dlsym(RTLD_NEXT, "unsetenv");
    return is_kept(name) ? 0 : next(name);
}
