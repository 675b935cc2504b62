// SPDX-License-Identifier: Apache-2.0
// SLOT SEATS (LOCKS.md 12.20): two slots, each with a manager seat that its owner writes, and one seat that machines without a slot claim and
// give back (its vote is bootmc.cpp; here it is one atomic word). Every binding is decided in copies that lie in the seats' own lines.
#include "mc.h"
#include <set>
enum{K=3,NS=2,MM=3};
struct Bd{u8 tag,inc,n;}; struct Bx{u8 slot,prev,n;};
struct P{u8 jp,slot,inc,tag,i,gen,dead; u8 mp,seat,e,k,s,wn,ws; Bd best,own[NS];};
struct S{u8 seat[K]; Bd bd[K][NS]; u8 idn[NS],idinc[NS],idleft[NS]; Bx bx[MM]; u8 boot; P p[MM]; u8 claims,crashes,leaves,retries,again,bad;};
static std::set<std::string> d; static bool D(const char*s){return d.count(s);} static int NM=3;
static int nonce(const P&x,int m){return 1+m*4+x.gen;} static int mach(int n){return (n-1)/4;}
static bool owns(const P&x,int s){return !x.dead&&(x.jp==3||x.jp==4||x.jp==6)&&x.slot==s;}
enum{LBOOT,LASK,LSEE,LCHK,LOWN,LID,LBACK,LRESIGN,LLEAVE,LRETRY,LSTART,LREAD,LCLAIM,LCOL,LADOPT,LFREE,LBIND,LDOWN,LCRASH,LAGAIN};
static const char*LN[]={"claims the open seat","asks for a slot","sees its binding","checks a seat","OWNS the slot","publishes ID","gives the open seat back","resigns","LEFT","retry","starts a takeover","reads a seat","CLAIM","collect","ADOPT","may bind","BIND","steps down","CRASH","comes back"};
// A write to seat k by machine m: no other machine may have the seat.
static void wrote(S&n,int m,int k){ if(k==0){ if(n.boot!=m+1) n.bad=2; } else for(int o=0;o<NM;o++) if(o!=m&&owns(n.p[o],k-1)) n.bad=2; }
template<class E> void gen(const S&s,E emit){
 for(int m=0;m<NM;m++){ const P&x=s.p[m]; if(x.dead){ if(s.again&&x.gen<3&&!D("none")){ S n=s; n.again--; u8 g=x.gen; n.p[m]=P{}; n.p[m].gen=g+1; n.bx[m]=Bx{}; emit(n,LAGAIN*4+m); } continue; }
  auto L=[&](int l){return l*4+m;}; S n=s; P&y=n.p[m];
  // The host.
  if(x.jp<2&&s.boot!=m+1){ bool over=!s.boot||s.p[s.boot-1].dead||s.p[s.boot-1].jp>=5||D("suspicion_is_proof"); if(over){ n.boot=m+1; emit(n,L(LBOOT)); n=s; } }
  switch(x.jp){
  case 0: { int b=0; for(int k=1;k<K;k++) if(s.seat[k]>s.seat[b]) b=k; if(!s.seat[b]) break; for(int t=0;t<NS;t++){ S q=s; q.bx[m]={(u8)(t+1),s.bd[b][t].n,(u8)nonce(x,m)}; q.p[m].jp=1; q.p[m].slot=t; emit(q,L(LASK)); } break; }
  case 1: for(int k=0;k<K;k++) if(s.bd[k][x.slot].tag&&s.bd[k][x.slot].n==nonce(x,m)){ S q=s; q.p[m].tag=s.bd[k][x.slot].tag; q.p[m].inc=s.bd[k][x.slot].inc; q.p[m].i=0; q.p[m].jp=D("accept_without_check")?3:2; emit(q,L(LSEE)); }
    if(s.retries){ S q=s; q.retries--; q.p[m].jp=0; q.bx[m]=Bx{}; emit(q,L(LRETRY)); } break;
  case 2: if(s.seat[x.i]>x.tag){ y.jp=1;y.tag=y.inc=y.i=0; emit(n,L(LCHK)); } else { y.i++; if(y.i==K){ y.i=y.tag=0; y.jp=3; emit(n,L(LOWN)); } else emit(n,L(LCHK)); } break;
  case 3: n.idn[x.slot]=nonce(x,m); n.idinc[x.slot]=x.inc; n.idleft[x.slot]=0; n.bx[m]=Bx{}; y.jp=4; emit(n,L(LID)); break;
  case 4: if(s.boot==m+1&&!(x.mp&&x.seat==0)){ n.boot=0; emit(n,L(LBACK)); n=s; }
    if(D("boot_seat_served_after_release")&&s.boot==m+1){ n.boot=0; emit(n,L(LBACK)); n=s; }
    if(s.leaves&&s.boot!=m+1&&(!x.mp||D("left_before_resigned"))){ n.leaves--; n.idleft[x.slot]=1; y.jp=5; if(!D("left_before_resigned")) y=P{.jp=5,.gen=x.gen}; emit(n,L(LLEAVE)); n=s; } break;
  }
  n=s;
  // Its manager.
  switch(x.mp){
  case 0: if(s.claims&&x.jp!=5){ int seat=-1; if(s.boot==m+1&&x.jp<3) seat=0; else if(x.jp==4||(D("seat_before_accept")&&x.jp==2)) seat=1+x.slot; if(seat>=0){ n.claims--; y.mp=1; y.seat=seat; y.e=y.k=y.s=0; y.best=Bd{}; emit(n,L(LSTART)); } } break;
  case 1: if(s.seat[x.k]>x.e) y.e=s.seat[x.k]; y.k++; if(y.k==K){ y.k=0; int e=y.e+1; while((e-1)%K!=x.seat) e++; y.e=e; y.mp=D("collect_before_claim")?3:2; } emit(n,L(LREAD)); break;
  case 2: n.seat[x.seat]=x.e; wrote(n,m,x.seat); y.mp=D("collect_before_claim")?4:3; emit(n,L(LCLAIM)); break;
  case 3: { Bd c=s.bd[x.k][x.s]; if(D("no_collect")&&x.k!=x.seat) c=Bd{}; if(D("new_owner_forgets")&&x.k==x.seat) c=Bd{}; if(c.tag>x.best.tag) y.best=c; y.k++; if(y.k==K){ y.k=0; y.own[x.s]=y.best; y.best=Bd{}; y.s++; if(y.s==NS){ y.s=0; y.mp=D("collect_before_claim")?2:4; } } emit(n,L(LCOL)); break; }
  case 4: y.own[x.s].tag=x.e; n.bd[x.seat][x.s]=y.own[x.s]; wrote(n,m,x.seat); y.s++; if(y.s==NS){ y.s=0; y.mp=5; } emit(n,L(LADOPT)); break;
  case 5: for(int o=0;o<NM;o++){ const Bx&b=s.bx[o]; if(!b.slot) continue; int t=b.slot-1; const Bd&a=x.own[t]; if(b.n==a.n||b.prev!=a.n||a.inc>=4) continue;
      bool ok=!a.inc||mach(a.n)==mach(b.n)||(s.idleft[t]&&s.idn[t]==a.n&&s.idinc[t]==a.inc)||s.p[mach(a.n)].dead||nonce(s.p[mach(a.n)],mach(a.n))!=a.n||D("suspicion_is_proof");
      if(ok){ S q=s; q.p[m].wn=b.n; q.p[m].ws=t; q.p[m].mp=6; emit(q,L(LFREE)); } }
    { bool higher=false; for(int k=0;k<K;k++) higher|=s.seat[k]>x.e; if(higher||x.jp==4){ P z{}; z.jp=x.jp;z.slot=x.slot;z.inc=x.inc;z.tag=x.tag;z.i=x.i;z.gen=x.gen; n.p[m]=z; emit(n,L(higher?LDOWN:LRESIGN)); n=s; } } break;
  case 6: { Bd b={x.e,(u8)(x.own[x.ws].inc+1),x.wn}; n.bd[x.seat][x.ws]=b; wrote(n,m,x.seat); y.own[x.ws]=b; y.wn=y.ws=0; y.mp=5; emit(n,L(LBIND)); break; }
  }
  if(s.crashes){ S q=s; q.crashes--; u8 g=x.gen; q.p[m]=P{}; q.p[m].gen=g; q.p[m].dead=1; emit(q,L(LCRASH)); } } }
int main(int c,char**v){ size_t cap=30000000; S s; memset(&s,0,sizeof s); s.claims=3;s.crashes=1;s.leaves=0;s.retries=0;s.again=0;
 for(int i=1;i<c;i++){ std::string a=v[i]; auto e=a.find('='); std::string k=a.substr(0,e),w=a.substr(e+1); int x=atoi(w.c_str()); if(k=="drop")d.insert(w); else if(k=="claims")s.claims=x; else if(k=="crashes")s.crashes=x; else if(k=="leaves")s.leaves=x; else if(k=="retries")s.retries=x; else if(k=="again")s.again=x; else if(k=="nm")NM=x; else if(k=="cap")cap=x*1000000ul; else return 2; }
 Explorer<S> X; auto bad=[&](const S&t){ if(t.bad) return (int)t.bad; for(int a=0;a<NS;a++){ int n=0; for(int m=0;m<NM;m++) n+=owns(t.p[m],a); if(n>1) return 1; }
   int b=0; for(int k=1;k<K;k++) if(t.seat[k]>t.seat[b]) b=k; for(int m=0;m<NM;m++) for(int a=0;a<NS;a++) if(owns(t.p[m],a)) for(int k=0;k<K;k++) if(t.bd[k][a].tag==t.seat[b]&&t.seat[b]&&t.bd[k][a].inc>t.p[m].inc) return 3; return 0; };
 int b=X.run(s,[&](const S&t,auto e){gen(t,e);},bad,cap); std::vector<long> cnt(32); for(auto&l:X.lab) cnt[l/4]++;
 const char*what[]={"ok","VIOLATION two live owners of one slot","VIOLATION a seat has two writers","VIOLATION slot bound anew while its incarnation lives"};
 printf("slot seats %s states=%zu edges=%zu%s owned=%ld binds=%ld claims=%ld left=%ld\n",what[b],X.st.size(),X.edges,X.capped?" CAPPED":"",cnt[LOWN],cnt[LBIND],cnt[LCLAIM],cnt[LLEAVE]);
 if(b){ auto t=X.trace(X.badAt); printf("   %zu steps: ",t.size()); for(int l:t) printf("%s(%d); ",LN[l/4],l%4); puts(""); } }
