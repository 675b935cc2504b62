// SPDX-License-Identifier: Apache-2.0
#include "process.h"
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {

/// The first bytes of a file of the kernel's; empty if it cannot be read.
std::string content(const char* path) {
    std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "re"), std::fclose);
    char bytes[1024];
    return file ? std::string(bytes, std::fread(bytes, 1, sizeof bytes, file.get())) : std::string();
}

/// FNV-1a of the boot id; 0 if there is none.
uint64_t boot() {
    std::string id = content("/proc/sys/kernel/random/boot_id");
    if (id.empty())
        return 0;
    uint64_t sum = 0xcbf29ce484222325;
    for (unsigned char byte : id)
        sum = (sum ^ byte) * 0x100000001b3;
    return sum;
}

uint64_t namespace_id() {
    struct stat info{};
    return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

/// State and start of a process, from /proc/PID/stat; false if it cannot be read.
bool read_stat(uint32_t pid, char& state, uint64_t& start_ticks) {
    std::string line = content(("/proc/" + std::to_string(pid) + "/stat").c_str());
    // The name in parentheses may hold anything.
    size_t end = line.rfind(')');
    if (end == std::string::npos || end + 2 >= line.size())
        return false;
    state = line[end + 2];
    const char* at = line.c_str() + end + 2;
    // Field 3 is the state, field 22 the start.
    for (int field = 3; field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (!at)
            return false;
        ++at;
    }
    start_ticks = std::strtoull(at, nullptr, 10);
    return start_ticks != 0;
}

} // namespace

ProcessMark own_process() {
    ProcessMark own;
    char state = 0;
    own.boot = boot();
    own.namespace_id = namespace_id();
    own.pid = static_cast<uint32_t>(getpid());
    return own.boot && own.namespace_id && read_stat(own.pid, state, own.start_ticks) ? own : ProcessMark();
}

bool has_process_ended(const ProcessMark& process) {
    if (process.boot == 0 || process.namespace_id == 0 || process.pid == 0 || process.boot != boot() ||
        process.namespace_id != namespace_id())
        return false;
    // Asked for by number, since /proc may hide the processes of other users.
    if (kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH)
        return true;
    char state = 0;
    uint64_t start_ticks = 0;
    if (!read_stat(process.pid, state, start_ticks))
        return false;
    return start_ticks != process.start_ticks || state == 'Z' || state == 'X';
}

} // namespace kvbm_cxl
