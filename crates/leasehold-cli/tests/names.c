// For tests: names that a file has the addresses of, one name in each line, are resolved by it. All others are resolved as usual.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*resolve)(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  resolve usual = (resolve)dlsym(RTLD_NEXT, "getaddrinfo");
  const char *path = getenv("NAMES_OF_THE_TEST");
  FILE *file = node && path ? fopen(path, "r") : NULL;
  char line[512];
  while (file && fgets(line, sizeof line, file)) {
    char *word = strtok(line, " \n");
    if (!word || strcmp(word, node) != 0) continue;
    struct addrinfo **last = found;
    *found = NULL;
    while ((word = strtok(NULL, " \n"))) {
      if (usual(word, service, hints, last) != 0) continue;
      while (*last) last = &(*last)->ai_next;
    }
    fclose(file);
    return *found ? 0 : EAI_NONAME;
  }
  if (file) fclose(file);
  return usual(node, service, hints, found);
}
