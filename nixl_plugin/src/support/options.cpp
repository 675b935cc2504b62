// SPDX-License-Identifier: Apache-2.0
#include "options.h"
#include "log.h"
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>

namespace kvbm_cxl {

namespace {

/// One option: where its number goes, and which ones can be meant; or its text, and the texts that can be (none listed = any).
struct Row {
    OptionRow doc;
    uint64_t Options::* number;
    uint64_t least;
    uint64_t most;
    std::string Options::* words = nullptr;
    std::array<std::string_view, 3> choices = {};
};

constexpr uint64_t no_limit = UINT64_MAX;

const Row rows[] = {
    {{"pool", "", "Devices of the pool, like /dev/dax0.0; empty = CXL_POOL of the environment."}, nullptr, 0, 0, &Options::pool},
    {{"timeout_ms", "10000",
      "Longest wait for a peer, in milliseconds; where it is more than 10 s, also for the pool's manager. Else that wait follows from "
      "`CXL_SUSPECT_MS`."},
     &Options::timeout_ms,
     1,
     3600'000},
    {{"inline_bytes", "256K", "Transfers up to this size end inside postXfer; larger ones go to worker threads."},
     &Options::inline_bytes,
     0,
     no_limit},
    {{"worker_threads", "2", "Threads that copy large transfers, started with the first one."}, &Options::worker_threads, 1, 64},
    {{"spin_us", "200",
      "How long the progress thread polls after the last activity before it sleeps, in microseconds. To wake a thread takes longer than a "
      "small transfer, in virtual machines many times as long."},
     &Options::spin_us,
     0,
     1'000'000},
    {{"staging_bytes", "64M", "Pool memory for staged transfers, at most, per engine."}, &Options::staging_bytes, 1 << 20, no_limit},
    {{"staging_chunk_bytes", "512K", "Pool memory of one step of a staged transfer."}, &Options::staging_chunk_bytes, 4096, 1 << 30},
    {{"namespace", "nixl", "Namespace of objects whose key does not name one: any text, or 32 hexadecimal digits."},
     nullptr,
     0,
     0,
     &Options::name_space},
    {{"object_checksums", "1", "1 = a checksum of each object is made and compared, 0 = not."}, &Options::object_checksums, 0, 1},
    {{"file_access", "auto", "How files are reached: auto, mmap (as a device) or pread."},
     nullptr,
     0,
     0,
     &Options::file_access,
     {"auto", "mmap", "pread"}},
    {{"cuda_library", "libcuda.so.1",
      "The CUDA driver, loaded at run time; none = GPU memory is not offered. Not given = CXL_CUDA_LIBRARY of the environment, if set."},
     nullptr,
     0,
     0,
     &Options::cuda_library},
};

const Row* find_row(std::string_view name) {
    const Row* found = std::find_if(std::begin(rows), std::end(rows), [&](const Row& row) { return name == row.doc.name; });
    return found == std::end(rows) ? nullptr : found;
}

/// The value that an option has without parameters.
std::string ambient(const Row& row) {
    // An operator who turns GPUs off for the pool's programs means the plugin, too.
    const char* set = row.words == &Options::cuda_library ? std::getenv("CXL_CUDA_LIBRARY") : nullptr;
    return set && *set ? set : row.doc.fallback;
}

Status take(const Row& row, std::string_view value, std::string_view where, Options& options) {
    if (row.words) {
        if (!row.choices[0].empty() && std::find(row.choices.begin(), row.choices.end(), value) == row.choices.end()) {
            std::string choices;
            for (std::string_view choice : row.choices)
                choices += text(choices.empty() ? "" : ", ", choice);
            return {NIXL_ERR_INVALID_PARAM, text("CXL: ", where, " is \"", value, "\"; it can be ", choices)};
        }
        options.*row.words = value;
        return {};
    }
    uint64_t number = 0;
    if (!parse_size(value, number))
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", where, " is \"", value, "\", which is no number with an optional K, M or G")};
    if (number < row.least || number > row.most)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", where, " is ", value, "; it can be ", row.least, " to ", row.most)};
    options.*row.number = number;
    return {};
}

} // namespace

bool parse_size(std::string_view text, uint64_t& bytes) {
    unsigned shift = 0;
    if (!text.empty()) {
        switch (std::toupper(static_cast<unsigned char>(text.back()))) {
        case 'K':
            shift = 10;
            break;
        case 'M':
            shift = 20;
            break;
        case 'G':
            shift = 30;
            break;
        }
    }
    if (shift)
        text.remove_suffix(1);
    uint64_t number = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc() || end != text.data() + text.size() || number > UINT64_MAX >> shift)
        return false;
    bytes = number << shift;
    return true;
}

Status read_options(const nixl_b_params_t& given, Options& options) {
    for (const Row& row : rows) {
        auto parameter = given.find(row.doc.name);
        bool is_given = parameter != given.end() && !parameter->second.empty();
        Status taken = is_given ? take(row, parameter->second, text("parameter ", row.doc.name), options)
                                : take(row, ambient(row), row.doc.name, options);
        if (!taken.ok())
            return taken;
    }
    for (const auto& [name, value] : given) {
        if (!find_row(name))
            log_once(LogLevel::warn, "option:" + name, text("CXL: there is no option \"", name, "\"; it is ignored"));
    }
    return {};
}

nixl_b_params_t default_options() {
    nixl_b_params_t options;
    for (const Row& row : rows)
        options.emplace(row.doc.name, ambient(row));
    return options;
}

std::vector<OptionRow> option_rows() {
    std::vector<OptionRow> documents;
    for (const Row& row : rows)
        documents.push_back(row.doc);
    return documents;
}

} // namespace kvbm_cxl
