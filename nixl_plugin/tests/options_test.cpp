// SPDX-License-Identifier: Apache-2.0
//
// Where the value of an option comes from, what is refused, and that the README's table is the table of the code.
#include "support/options.h"
#include "support/pools.h"
#include <fstream>
#include <sstream>

using namespace kvbm_cxl;

namespace {

void sizes() {
    const std::pair<const char*, uint64_t> right[] = {{"0", 0}, {"1", 1}, {"64K", 65536}, {"2m", 2 << 20}, {"3G", uint64_t{3} << 30}};
    for (auto [given, wanted] : right) {
        uint64_t bytes = 7;
        CHECK(parse_size(given, bytes) && bytes == wanted);
    }
    for (const char* given : {"", "K", "-1", "1KB", "1 K", " 1", "0x10", "1.5M", "18446744073709551616", "18446744073709551615K"}) {
        uint64_t bytes = 7;
        CHECK(!parse_size(given, bytes) && bytes == 7);
    }
}

void precedence() {
    Options options;
    CHECK_OK(read_options({}, options));
    CHECK(options.spin_us == 200 && options.pool.empty());
    // An application that hands the defaults back gets them, as KVBM does.
    CHECK(default_options().at("spin_us") == "200");
    CHECK_OK(read_options(default_options(), options));
    CHECK(options.spin_us == 200);
    CHECK_OK(read_options({{"spin_us", "7"}, {"pool", "/dev/dax9.0"}}, options));
    CHECK(options.spin_us == 7 && options.pool == "/dev/dax9.0");
    CHECK_OK(read_options({{"spin_us", ""}, {"another_backends", "1"}}, options));
    CHECK(options.spin_us == 200);
    Status refused = read_options({{"spin_us", "soon"}}, options);
    CHECK(refused.code() == NIXL_ERR_INVALID_PARAM && refused.reason().find("spin_us") != std::string::npos);
    refused = read_options({{"worker_threads", "65"}}, options);
    CHECK(refused.code() == NIXL_ERR_INVALID_PARAM && refused.reason().find("worker_threads") != std::string::npos);
    // The driver has a name in the environment that all programs of the pool know; a parameter overrides it.
    setenv("CXL_CUDA_LIBRARY", "none", 1);
    CHECK_OK(read_options({}, options));
    CHECK(options.cuda_library == "none");
    CHECK_OK(read_options({{"cuda_library", "libother.so"}}, options));
    CHECK(options.cuda_library == "libother.so");
    unsetenv("CXL_CUDA_LIBRARY");
}

void every_option_has_a_readable_default() {
    CHECK(default_options().size() == option_rows().size());
    for (const OptionRow& row : option_rows())
        CHECK(default_options().at(row.name) == row.fallback && *row.meaning);
}

/// The rows of the README are "| `name` | `default` | meaning |".
void readme(const std::string& path) {
    std::ifstream file(path);
    CHECK(file);
    std::stringstream content;
    content << file.rdbuf();
    std::string text = content.str();
    for (const OptionRow& row : option_rows()) {
        std::string fallback = *row.fallback ? "`" + std::string(row.fallback) + "`" : "";
        std::string wanted = "| `" + std::string(row.name) + "` | " + fallback + (fallback.empty() ? "| " : " | ") + row.meaning + " |";
        if (text.find(wanted) == std::string::npos) {
            std::fprintf(stderr, "%s has no row\n%s\n", path.c_str(), wanted.c_str());
            std::_Exit(1);
        }
    }
}

} // namespace

int main(int argc, char** argv) {
    CHECK(argc == 2);
    unsetenv("CXL_CUDA_LIBRARY");
    sizes();
    every_option_has_a_readable_default();
    precedence();
    readme(std::string(argv[1]) + "/README.md");
}
